// Entries of tensors: float32, bfloat16 or float16 in memory, and float32 in the kernels.
#pragma once
#include <ATen/ATen.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "matrix.h"

namespace halflife {

using OptionalTensor = std::optional<at::Tensor>;

// An uninitialised tensor of the shape and the type of x, with dense rows.
inline at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

inline std::vector<int64_t> integers(const at::Tensor& x) {
  const at::Tensor dense = x.to(at::kLong).contiguous();
  return {dense.data_ptr<int64_t>(), dense.data_ptr<int64_t>() + dense.numel()};
}

constexpr int64_t kWidth = Vec::size();

// The number of entries of a row of `size` that the vector at j holds.
inline int64_t lanes(int64_t j, int64_t size) { return std::min(kWidth, size - j); }

inline Vec widen(const at::BFloat16* p) {
  Vec out;
  at::vec::load_fp32_from_bf16(p, out);
  return out;
}
inline Vec widen(const at::Half* p) {
  Vec out;
  at::vec::load_fp32_from_fp16(p, out);
  return out;
}

// Read n entries; the others are 0.
inline Vec read(const float* p, int64_t n) { return n == kWidth ? Vec::loadu(p) : Vec::loadu(p, n); }
template <class T>
inline Vec read(const T* p, int64_t n) {
  if (n == kWidth) return widen(p);
  T part[kWidth];
  std::fill_n(part, kWidth, T(0.f));
  std::copy_n(p, n, part);
  return widen(part);
}

// Write the first n entries.
inline void write(float* p, Vec x, int64_t n) {
  if (n == kWidth)
    x.store(p);
  else
    x.store(p, static_cast<int>(n));
}
inline void write(at::BFloat16* p, Vec x, int64_t n) {
  at::vec::convert_float_bfloat16(x, x).store(p, static_cast<int>(n));
}
inline void write(at::Half* p, Vec x, int64_t n) { at::vec::convert_float_half(x, x).store(p, static_cast<int>(n)); }

// Call f with a zero of the type of the entries of x.
template <class F>
inline auto by_type(at::ScalarType type, F f) {
  if (type == at::kBFloat16) return f(at::BFloat16());
  if (type == at::kHalf) return f(at::Half());
  TORCH_CHECK(type == at::kFloat, "native kernels take float32, bfloat16 and float16; got ", type);
  return f(float());
}
template <class F>
inline auto by_type(const at::Tensor& x, F f) {
  return by_type(x.scalar_type(), f);
}

// The n entries of one row of a tensor, whose first is the one at `in` or `out`.
inline void load_row(at::ScalarType type, const void* in, float* out, int64_t n) {
  by_type(type, [&](auto entry) {
    const auto* p = static_cast<const decltype(entry)*>(in);
    int64_t j = 0;
    for (; j + kWidth <= n; j += kWidth) read(p + j, kWidth).store(out + j);
    for (; j < n; j++) out[j] = static_cast<float>(p[j]);
  });
}
inline void store_row(at::ScalarType type, const float* in, void* out, int64_t n) {
  by_type(type, [&](auto entry) {
    auto* p = static_cast<decltype(entry)*>(out);
    int64_t j = 0;
    for (; j + kWidth <= n; j += kWidth) write(p + j, Vec::loadu(in + j), kWidth);
    for (; j < n; j++) p[j] = static_cast<decltype(entry)>(in[j]);
  });
}

}  // namespace halflife
