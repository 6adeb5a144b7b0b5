// LightNet's decay and key (`running_decay` in halflife/ops/linear_attention.py), with lse_t = log Σ_{s ≤ t} e^{f_s}:
//
//   p_t = σ(f_t − lse_{t−1}),   g_t = log(1 − p_t) = −softplus(f_t − lse_{t−1}),   lse_t = lse_{t−1} − g_t
#include <torch/library.h>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

constexpr int64_t kVectors = 8;  // vectors of channels that one task takes along a sequence

// Call f(sequence, first row, last row, first channel, last channel) in parallel.
template <class F>
void each_strip(const Tensor& x, const OptionalTensor& cu_seqlens, F f) {
  std::vector<int64_t> bounds(x.size(0) + 1);
  for (size_t n = 0; n < bounds.size(); n++) bounds[n] = n * x.size(1);
  if (cu_seqlens) bounds = integers(*cu_seqlens);
  const int64_t width = kVectors * kWidth, strips = (x.size(2) + width - 1) / width;
  at::parallel_for(0, (bounds.size() - 1) * strips, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++) {
      const int64_t n = task / strips, channel = task % strips * width;
      f(n, bounds[n], bounds[n + 1], channel, std::min(channel + width, x.size(2)));
    }
  });
}

// Call f(number, first channel, channels) for the vectors of a strip.
template <class F>
inline void each_vector(int64_t begin, int64_t end, F f) {
  for (int64_t v = 0, j = begin; j < end; v++, j += kWidth) f(v, j, lanes(j, end));
}

std::tuple<Tensor, Tensor, Tensor> running_decay(Tensor f, Tensor first, OptionalTensor cu_seqlens) {
  const auto options = f.options().dtype(at::kFloat);
  Tensor g = at::empty(f.sizes(), options), last = at::empty(first.sizes(), options);
  Tensor key = like(f);
  by_type(f, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> x(f), k(key);
    const Rows2<float> decay(g), entering(first), leaving(last);
    each_strip(f, cu_seqlens, [&](int64_t n, int64_t from, int64_t to, int64_t begin, int64_t end) {
      Vec sums[kVectors];
      each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) { sums[v] = read(entering.row(n) + j, count); });
      for (int64_t t = from; t < to; t++)
        each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) {
          Vec& sum = sums[v];
          const Vec value = read(x.row(t) + j, count), d = value - sum, e = exp_nonpositive(d.abs().neg());
          const Vec rest = e.log1p();
          write(decay.row(t) + j, (at::vec::maximum(d, Vec(0.f)) + rest).neg(), count);
          write(k.row(t) + j, Vec::blendv(Vec(1.f), e, d < Vec(0.f)) / (Vec(1.f) + e), count);
          sum = at::vec::maximum(value, sum) + rest;
        });
      each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) { write(leaving.row(n) + j, sums[v], count); });
    });
  });
  return {g, last, key};
}

// With u_t, the gradient of f_t − lse_{t−1} by g_t and p_t, that of lse_t is D_{t−1} = (1 − p_t) D_t − u_t.
std::vector<Tensor> running_decay_backward(Tensor dg, Tensor dlast, Tensor dkey, Tensor f, Tensor first,
                                           OptionalTensor cu_seqlens) {
  const Tensor g = std::get<0>(running_decay(f, first, cu_seqlens));
  Tensor df = like(dkey), dfirst = like(dlast);
  by_type(df, [&](auto entry) {
    using T = decltype(entry);
    const Rows2<T> of_key(dkey), out(df);
    const Rows2<float> of_decay(dg), decay(g), leaving(dlast), entering(dfirst);
    each_strip(df, cu_seqlens, [&](int64_t n, int64_t from, int64_t to, int64_t begin, int64_t end) {
      Vec sums[kVectors];
      each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) { sums[v] = read(leaving.row(n) + j, count); });
      for (int64_t t = to - 1; t >= from; t--)
        each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) {
          Vec& sum = sums[v];
          const Vec p = read(decay.row(t) + j, count).expm1().neg(), others = Vec(1.f) - p;
          const Vec u = p * (read(of_key.row(t) + j, count) * others - read(of_decay.row(t) + j, count));
          write(out.row(t) + j, at::vec::fmadd(sum, p, u), count);
          sum = sum * others - u;
        });
      each_vector(begin, end, [&](int64_t v, int64_t j, int64_t count) { write(entering.row(n) + j, sums[v], count); });
    });
  });
  return {df, dfirst};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "running_decay(Tensor f, Tensor first, Tensor? cu_seqlens) -> (Tensor, Tensor, Tensor)",
      torch::dispatch(at::kCPU, running_decay));
  m.def(
      "running_decay_backward(Tensor dg, Tensor dlast, Tensor dkey, Tensor f, Tensor first, Tensor? cu_seqlens) "
      "-> Tensor[]",
      torch::dispatch(at::kCPU, running_decay_backward));
}

}  // namespace halflife
