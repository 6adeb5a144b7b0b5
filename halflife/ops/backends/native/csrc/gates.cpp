// Products of a layer that are passes over memory (halflife/ops/fused.py):
//
//   swiglu        y = silu(a) ⊙ b
//   scale_heads   y = x ⊙ s, one number s a token and head
//   rotate        the pairs (i, i + P) of a head turn by an angle
#include <torch/library.h>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

// ------------------------------------------------------------------------------------------------ swiglu

Tensor swiglu(Tensor a, Tensor b) {
  Tensor y = like(a);
  by_type(a, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> first(a), second(b), out(y);
    each_block(first.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t j = 0; j < first.cols; j += kWidth) {
          const int64_t n = lanes(j, first.cols);
          write(out.row(i) + j, silu(read(first.row(i) + j, n)) * read(second.row(i) + j, n), n);
        }
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> swiglu_backward(Tensor dy, Tensor a, Tensor b) {
  Tensor da = like(a), db = like(b);
  by_type(a, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> grad(dy), first(a), second(b), dfirst(da), dsecond(db);
    each_block(first.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t j = 0; j < first.cols; j += kWidth) {
          const int64_t n = lanes(j, first.cols);
          const Vec g = read(grad.row(i) + j, n), x = read(first.row(i) + j, n), s = sigmoid(x);
          write(dfirst.row(i) + j, g * read(second.row(i) + j, n) * silu_slope(x, s), n);
          write(dsecond.row(i) + j, g * x * s, n);
        }
    });
  });
  return {da, db};
}

// ------------------------------------------------------------------------------------------- scale_heads

// x [tokens, H · V], s [tokens, H] in float32.
Tensor scale_heads(Tensor x, Tensor s) {
  Tensor y = like(x);
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> in(x), out(y);
    const Rows2<float> factors(s);
    const int64_t size = in.cols / factors.cols;
    each_block(in.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < factors.cols; h++)
          for (int64_t j = 0; j < size; j += kWidth) {
            const int64_t n = lanes(j, size), at = h * size + j;
            write(out.row(i) + at, read(in.row(i) + at, n) * Vec(factors.row(i)[h]), n);
          }
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> scale_heads_backward(Tensor dy, Tensor x, Tensor s) {
  Tensor dx = like(x), ds = like(s);
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> grad(dy), in(x), din(dx);
    const Rows2<float> factors(s), dfactors(ds);
    const int64_t size = in.cols / factors.cols;
    each_block(in.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < factors.cols; h++) {
          Vec total(0.f);
          for (int64_t j = 0; j < size; j += kWidth) {
            const int64_t n = lanes(j, size), at = h * size + j;
            const Vec g = read(grad.row(i) + at, n);
            total = at::vec::fmadd(g, read(in.row(i) + at, n), total);
            write(din.row(i) + at, g * Vec(factors.row(i)[h]), n);
          }
          dfactors.row(i)[h] = sum(total);
        }
    });
  });
  return {dx, ds};
}

// ------------------------------------------------------------------------------------------------ rotate

// x [B, T, H, K]; cos, sin [B or 1, T, P] in float32. `sign` −1 turns back.
Tensor rotate(Tensor x, Tensor cos, Tensor sin, double sign) {
  Tensor y = like(x);
  const int64_t heads = x.size(2), size = x.size(3), pairs = cos.size(2), rows = x.size(0) * x.size(1);
  const Vec factor(static_cast<float>(sign));
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> in(x.flatten(2)), out(y.flatten(2));
    const Rows2<float> c(cos), s(sin);
    each_block(rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) {
        const float *cos_row = c.row(i % c.rows), *sin_row = s.row(i % s.rows);
        for (int64_t h = 0; h < heads; h++) {
          const T* from_head = in.row(i) + h * size;
          T* to_head = out.row(i) + h * size;
          for (int64_t j = 0; j < pairs; j += kWidth) {
            const int64_t n = lanes(j, pairs);
            const Vec co = read(cos_row + j, n), si = read(sin_row + j, n) * factor;
            const Vec a = read(from_head + j, n), b = read(from_head + pairs + j, n);
            write(to_head + j, a * co - b * si, n);
            write(to_head + pairs + j, b * co + a * si, n);
          }
          std::copy_n(from_head + 2 * pairs, size - 2 * pairs, to_head + 2 * pairs);
        }
      }
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def("swiglu(Tensor a, Tensor b) -> Tensor", torch::dispatch(at::kCPU, swiglu));
  m.def(
      "swiglu_backward(Tensor dy, Tensor a, Tensor b) -> (Tensor, Tensor)",
      torch::dispatch(at::kCPU, swiglu_backward));
  m.def("scale_heads(Tensor x, Tensor s) -> Tensor", torch::dispatch(at::kCPU, scale_heads));
  m.def(
      "scale_heads_backward(Tensor dy, Tensor x, Tensor s) -> (Tensor, Tensor)",
      torch::dispatch(at::kCPU, scale_heads_backward));
  m.def("rotate(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor", torch::dispatch(at::kCPU, rotate));
}

}  // namespace halflife
