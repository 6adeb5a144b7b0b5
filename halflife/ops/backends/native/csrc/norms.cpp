// Norms over groups of channels, with the gate and the skip connection around them (halflife/ops/fused.py):
//
//   u = (x + scale ⊙ skip) ⊙ gate₁,      y = u / √(factor · Σ u² + eps) ⊙ weight ⊙ gate₂
//
// The sum runs over a group. One of the gates is silu(z) or σ(z), and the others are 1. `factor` is 1 / size for a mean square,
// and 1 for an L2 norm. The backward pass computes u again from the inputs.
#include <torch/library.h>

#include <cmath>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

enum class Gate { none, silu_before, sigmoid_before, silu_after, sigmoid_after };

template <Gate kGate>
constexpr bool kBefore = kGate == Gate::silu_before || kGate == Gate::sigmoid_before;
template <Gate kGate>
constexpr bool kAfter = kGate == Gate::silu_after || kGate == Gate::sigmoid_after;

// The gate of z, and its derivative, from s = sigmoid(z).
template <Gate kGate>
inline Vec opened(Vec z, Vec s) {
  return kGate == Gate::silu_before || kGate == Gate::silu_after ? z * s : s;
}
template <Gate kGate>
inline Vec slope_of(Vec z, Vec s) {
  return kGate == Gate::silu_before || kGate == Gate::silu_after ? silu_slope(z, s) : s * (Vec(1.f) - s);
}

Gate gate_of(const std::string& name) {
  if (name == "none") return Gate::none;
  if (name == "silu_before") return Gate::silu_before;
  if (name == "sigmoid_before") return Gate::sigmoid_before;
  if (name == "silu_after") return Gate::silu_after;
  TORCH_CHECK(name == "sigmoid_after", "no gate of a norm: ", name);
  return Gate::sigmoid_after;
}

// Call f with the gate as a constant.
template <class F>
void by_gate(Gate gate, F f) {
  switch (gate) {
    case Gate::none: return f(std::integral_constant<Gate, Gate::none>());
    case Gate::silu_before: return f(std::integral_constant<Gate, Gate::silu_before>());
    case Gate::sigmoid_before: return f(std::integral_constant<Gate, Gate::sigmoid_before>());
    case Gate::silu_after: return f(std::integral_constant<Gate, Gate::silu_after>());
    case Gate::sigmoid_after: return f(std::integral_constant<Gate, Gate::sigmoid_after>());
  }
}

template <class T>
struct Call {
  Rows2<T> x, gate, skip;
  Tensor weight, scale;  // one number a channel, in float32; undefined where there is none
  int64_t group;
  float factor, eps;
  // Loops read these pointers: to ask a tensor for its memory costs as much as several vectors.
  const float *weights = memory(weight), *scales = memory(scale);

  static const float* memory(const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; }
};

// A parameter with one number for each of a few channels or heads, as one number a channel.
Tensor per_channel(const OptionalTensor& x, int64_t channels, bool heads) {
  if (!x) return Tensor();
  const Tensor wide = x->to(at::kFloat);
  if (heads) return wide.unsqueeze(1).expand({-1, channels / x->size(0)}).reshape({channels}).contiguous();
  return wide.unsqueeze(0).expand({channels / x->size(0), -1}).reshape({channels}).contiguous();
}

// The reverse for gradients.
Tensor from_channels(const Tensor& sums, const OptionalTensor& x, bool heads) {
  const int64_t size = x->size(0), repeats = sums.numel() / size;
  const Tensor sum = heads ? sums.view({size, repeats}).sum(1) : sums.view({repeats, size}).sum(0);
  return sum.to(x->scalar_type());
}

template <class T>
Call<T> make_call(const Tensor& x, const OptionalTensor& gate, const OptionalTensor& weight,
                  const OptionalTensor& skip, const OptionalTensor& scale, int64_t group, bool mean, double eps) {
  const int64_t channels = x.size(-1);
  return {Rows2<T>(x), Rows2<T>(gate), Rows2<T>(skip), per_channel(weight, channels, false),
          per_channel(scale, channels, true), group, mean ? 1.f / group : 1.f, static_cast<float>(eps)};
}

// x + scale ⊙ skip.
template <class T>
inline Vec with_skip(const Call<T>& c, int64_t row, int64_t j, int64_t n) {
  const Vec x = read(c.x.row(row) + j, n);
  return c.skip ? at::vec::fmadd(read(c.skip.row(row) + j, n), read(c.scales + j, n), x) : x;
}

// One group of one row: v = x + scale ⊙ skip, s = σ(z) and u.
struct Group {
  explicit Group(int64_t size) : values(4, round_up(size)) {}
  float* v() const { return values->row(0); }
  float* s() const { return values->row(1); }
  float* u() const { return values->row(2); }
  float* dn() const { return values->row(3); }
  Buffer values;
};

// Compute `out` of a group and return 1 / √(factor · Σ u² + eps). Entries behind the last channel are 0.
template <Gate kGate, class T>
inline float norm_group(const Call<T>& c, int64_t row, int64_t start, const Group& out) {
  float *v = out.v(), *s = out.s(), *u = out.u();
  Vec squares(0.f);
  for (int64_t j = 0; j < c.group; j += kWidth) {
    const int64_t n = lanes(j, c.group);
    Vec x = with_skip(c, row, start + j, n);
    if constexpr (kBefore<kGate>) {
      const Vec z = read(c.gate.row(row) + start + j, n), gate = sigmoid(z);
      x.store(v + j);
      gate.store(s + j);
      x = x * opened<kGate>(z, gate);
    }
    x.store(u + j);
    squares = at::vec::fmadd(x, x, squares);
  }
  return 1.f / std::sqrt(sum(squares) * c.factor + c.eps);
}

template <Gate kGate, class T>
void run(const Call<T>& c, T* y) {
  each_block(c.x.rows, [&](int64_t, int64_t first, int64_t last) {
    const Group group(c.group);
    for (int64_t row = first; row < last; row++)
      for (int64_t start = 0; start < c.x.cols; start += c.group) {
        const Vec r(norm_group<kGate>(c, row, start, group));
        for (int64_t j = 0; j < c.group; j += kWidth) {
          const int64_t n = lanes(j, c.group);
          Vec out = Vec::loadu(group.u() + j) * r;
          if (c.weights) out = out * read(c.weights + start + j, n);
          if constexpr (kAfter<kGate>) {
            const Vec z = read(c.gate.row(row) + start + j, n);
            out = out * opened<kGate>(z, sigmoid(z));
          }
          write(y + row * c.x.cols + start + j, out, n);
        }
      }
  });
}

template <class T>
struct Grads {
  Rows2<T> dy;
  T *dx = nullptr, *dgate = nullptr, *dskip = nullptr;  // dense rows
  float *dweight = nullptr, *dscale = nullptr;          // one sum a block and channel
};

// With n = u r and dn the gradient of n:  du = r (dn − n · factor · Σ n dn).
template <Gate kGate, class T>
void run_backward(const Call<T>& c, const Grads<T>& g) {
  each_block(c.x.rows, [&](int64_t block, int64_t first, int64_t last) {
    const Group group(c.group);
    float *u = group.u(), *dn = group.dn();
    float* dweight = g.dweight ? g.dweight + block * c.x.cols : nullptr;
    float* dscale = g.dscale ? g.dscale + block * c.x.cols : nullptr;
    for (int64_t row = first; row < last; row++)
      for (int64_t start = 0; start < c.x.cols; start += c.group) {
        const float rate = norm_group<kGate>(c, row, start, group);
        const Vec r(rate);
        Vec dots(0.f);
        for (int64_t j = 0; j < c.group; j += kWidth) {
          const int64_t n = lanes(j, c.group), at = start + j;
          const Vec normed = Vec::loadu(u + j) * r;
          Vec grad = read(g.dy.row(row) + at, n);
          const Vec weight = c.weights ? read(c.weights + at, n) : Vec(1.f);
          if constexpr (kAfter<kGate>) {
            const Vec z = read(c.gate.row(row) + at, n), s = sigmoid(z);
            write(g.dgate + row * c.x.cols + at, grad * normed * weight * slope_of<kGate>(z, s), n);
            grad = grad * opened<kGate>(z, s);
          }
          if (dweight) write(dweight + at, at::vec::fmadd(grad, normed, read(dweight + at, n)), n);
          grad = grad * weight;
          grad.store(dn + j);
          dots = at::vec::fmadd(grad, normed, dots);
        }
        const Vec shared(sum(dots) * c.factor * rate);
        for (int64_t j = 0; j < c.group; j += kWidth) {
          const int64_t n = lanes(j, c.group), at = start + j;
          Vec du = r * (Vec::loadu(dn + j) - Vec::loadu(u + j) * shared);
          if constexpr (kBefore<kGate>) {
            const Vec z = read(c.gate.row(row) + at, n), s = Vec::loadu(group.s() + j);
            write(g.dgate + row * c.x.cols + at, du * Vec::loadu(group.v() + j) * slope_of<kGate>(z, s), n);
            du = du * opened<kGate>(z, s);
          }
          write(g.dx + row * c.x.cols + at, du, n);
          if (c.skip) {
            write(g.dskip + row * c.x.cols + at, du * read(c.scales + at, n), n);
            write(dscale + at, at::vec::fmadd(du, read(c.skip.row(row) + at, n), read(dscale + at, n)), n);
          }
        }
      }
  });
}

Tensor forward(Tensor x, OptionalTensor gate, OptionalTensor weight, OptionalTensor skip, OptionalTensor scale,
               std::string kind, int64_t group, bool mean, double eps) {
  Tensor y = like(x);
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Call<T> c = make_call<T>(x, gate, weight, skip, scale, group, mean, eps);
    by_gate(gate_of(kind), [&](auto constant) { run<constant.value>(c, y.data_ptr<T>()); });
  });
  return y;
}

std::vector<Tensor> backward(Tensor dy, Tensor x, OptionalTensor gate, OptionalTensor weight, OptionalTensor skip,
                             OptionalTensor scale, std::string kind, int64_t group, bool mean, double eps) {
  const Tensor none = at::empty({0}, x.options());
  Tensor dx = like(x), dgate = gate ? like(x) : none, dskip = skip ? like(x) : none;
  const int64_t channels = x.size(-1), rows = channels ? x.numel() / channels : 0;
  auto sums = [&](bool there) {
    return at::zeros({there ? blocks(rows) : 0, channels}, x.options().dtype(at::kFloat));
  };
  Tensor dweight = sums(weight.has_value()), dscale = sums(scale.has_value());
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Call<T> c = make_call<T>(x, gate, weight, skip, scale, group, mean, eps);
    Grads<T> g{Rows2<T>(dy), dx.data_ptr<T>(), dgate.data_ptr<T>(), dskip.data_ptr<T>()};
    if (weight) g.dweight = dweight.data_ptr<float>();
    if (scale) g.dscale = dscale.data_ptr<float>();
    by_gate(gate_of(kind), [&](auto constant) { run_backward<constant.value>(c, g); });
  });
  return {dx, dgate, weight ? from_channels(sum_of_blocks(dweight), weight, false) : none, dskip,
          scale ? from_channels(sum_of_blocks(dscale), scale, true) : none};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "norm(Tensor x, Tensor? gate, Tensor? weight, Tensor? skip, Tensor? scale, str kind, int group, bool mean, "
      "float eps) -> Tensor",
      torch::dispatch(at::kCPU, forward));
  m.def(
      "norm_backward(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor? skip, Tensor? scale, str kind, "
      "int group, bool mean, float eps) -> Tensor[]",
      torch::dispatch(at::kCPU, backward));
}

}  // namespace halflife
