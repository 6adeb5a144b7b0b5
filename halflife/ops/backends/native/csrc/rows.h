// Passes over the rows of tensors: entries are float32 or narrower in memory and float32 in registers.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "decay.h"
#include "entries.h"

namespace halflife {

// 1 / x for x in [1, 2], with an error of about one unit in the last place.
inline Vec reciprocal(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 v = x, guess = _mm512_rcp14_ps(v);
  return _mm512_mul_ps(guess, _mm512_fnmadd_ps(v, guess, _mm512_set1_ps(2.f)));
#else
  return Vec(1.f) / x;
#endif
}

inline Vec sigmoid(Vec x) {
  const Vec e = exp_nonpositive(x.abs().neg());
  return Vec::blendv(Vec(1.f), e, x < Vec(0.f)) * reciprocal(Vec(1.f) + e);
}
inline Vec silu(Vec x) { return x * sigmoid(x); }

// The derivative of silu at x, from s = sigmoid(x).
inline Vec silu_slope(Vec x, Vec s) { return s * at::vec::fmadd(x, Vec(1.f) - s, Vec(1.f)); }

// A tensor as a matrix with one row a token. Rows may have any distance, but their entries are dense.
template <class T>
struct Rows2 {
  T* data = nullptr;
  int64_t rows = 0, cols = 0, step = 0;
  at::Tensor owner;

  Rows2() = default;
  explicit Rows2(const at::Tensor& x) {
    cols = x.size(-1);
    rows = cols ? x.numel() / cols : 0;
    owner = x.reshape({rows, cols});
    if (cols > 1 && owner.stride(1) != 1) owner = owner.contiguous();
    step = owner.stride(0);
    data = owner.data_ptr<T>();
  }
  explicit Rows2(const std::optional<at::Tensor>& x) {
    if (x) *this = Rows2(*x);
  }
  explicit operator bool() const { return data != nullptr; }
  T* row(int64_t i) const { return data + i * step; }
};

// Rows that one thread does at a time. Sums over rows are made of the sums of these blocks, in their order, so that the
// number of threads changes no bit.
constexpr int64_t kBlock = 64;
inline int64_t blocks(int64_t rows) { return (rows + kBlock - 1) / kBlock; }

// Call f(block, first row, last row) for all blocks in parallel.
template <class F>
inline void each_block(int64_t rows, F f) {
  at::parallel_for(0, blocks(rows), 1, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++) f(n, n * kBlock, std::min((n + 1) * kBlock, rows));
  });
}

// Σ_n parts[n], first to last.
inline at::Tensor sum_of_blocks(const at::Tensor& parts) {
  at::Tensor out = at::zeros({parts.size(1)}, parts.options());
  float* o = out.data_ptr<float>();
  const float* p = parts.data_ptr<float>();
  for (int64_t n = 0; n < parts.size(0); n++, p += parts.size(1))
    for (int64_t j = 0; j < parts.size(1); j++) o[j] += p[j];
  return out;
}

}  // namespace halflife
