// Passes of Mamba-3 (halflife/ops/trapezoid):
//
//   trapezoid_keys     q = R(φ) (norm(c) ⊙ w_q + b_q),   k = R(φ) (norm(b) ⊙ w_k + b_k),   q · k
//   trapezoid_output   y = (o + (γ q·k + D) v) ⊙ silu(z)
#include <torch/library.h>

#include <cmath>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

constexpr float kTurn = 6.28318531f;  // 2π

Tensor nothing(const Tensor& x) { return at::empty({0}, x.options()); }

// ------------------------------------------------------------------------------------------- queries and keys

// Queries or keys: x [rows, G · K], and weight [K] and bias [H, K] of the norm over each group, or neither and G = H.
template <class T>
struct Side {
  Rows2<T> x;
  Rows2<float> weight, bias;
  int64_t heads, size, groups;

  Side(const Tensor& x_, const OptionalTensor& weight_, const OptionalTensor& bias_, int64_t angles)
      : x(x_), weight(weight_), bias(bias_), heads(bias_ ? bias_->size(0) : angles),
        size(bias_ ? bias_->size(1) : x_.size(-1) / angles), groups(x_.size(-1) / size) {}

  int64_t group(int64_t head) const { return head / (heads / groups); }
};

// One token: `unit` [G · K] is x times `inverse` [G], one over the root of its mean square; `out` [H · K] is turned.
template <class T>
struct Token {
  const Side<T>& m;
  std::vector<float> unit, inverse, out, sums;

  explicit Token(const Side<T>& m_)
      : m(m_), unit(m.groups * m.size), inverse(m.groups), out(m.heads * m.size), sums(m.groups * m.size) {}

  void forward(int64_t i, const float* cos, const float* sin, int64_t angles, int64_t pairs, float eps) {
    for (int64_t g = 0; g < m.groups; g++) {
      float* u = &unit[g * m.size];
      const T* x = m.x.row(i) + g * m.size;
      for (int64_t j = 0; j < m.size; j++) u[j] = static_cast<float>(x[j]);
      if (!m.weight) continue;
      float square = 0.f;
      for (int64_t j = 0; j < m.size; j++) square += u[j] * u[j];
      inverse[g] = 1.f / std::sqrt(square / m.size + eps);
      for (int64_t j = 0; j < m.size; j++) u[j] *= inverse[g];
    }
    for (int64_t h = 0; h < m.heads; h++) {
      const float *u = &unit[m.group(h) * m.size], *co = cos + h % angles * pairs, *si = sin + h % angles * pairs;
      float* o = &out[h * m.size];
      if (m.weight) {
        const float *w = m.weight.row(0), *b = m.bias.row(h);
        for (int64_t j = 0; j < m.size; j++) o[j] = u[j] * w[j] + b[j];
      } else {
        std::copy_n(u, m.size, o);
      }
      for (int64_t p = 0; p < pairs; p++) {
        const float first = o[p], second = o[p + pairs];
        o[p] = first * co[p] - second * si[p];
        o[p + pairs] = second * co[p] + first * si[p];
      }
    }
  }

  // From the gradient d [H · K] of `out`, which is overwritten.
  void backward(int64_t i, float* d, const float* cos, const float* sin, int64_t angles, int64_t pairs, T* dx,
                float* dangle, float* dweight, float* dbias) {
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t h = 0; h < m.heads; h++) {
      const float *o = &out[h * m.size], *co = cos + h % angles * pairs, *si = sin + h % angles * pairs;
      float *dh = d + h * m.size, *da = dangle + h % angles * pairs, *sum = &sums[m.group(h) * m.size];
      for (int64_t p = 0; p < pairs; p++) {
        const float first = dh[p], second = dh[p + pairs];
        da[p] += kTurn * (second * o[p] - first * o[p + pairs]);
        dh[p] = first * co[p] + second * si[p];
        dh[p + pairs] = second * co[p] - first * si[p];
      }
      for (int64_t j = 0; j < m.size; j++) sum[j] += dh[j];
      if (m.weight)
        for (int64_t j = 0; j < m.size; j++) dbias[h * m.size + j] += dh[j];
    }
    for (int64_t g = 0; g < m.groups; g++) {
      float *sum = &sums[g * m.size], mean = 0.f, scale = 1.f;
      const float* u = &unit[g * m.size];
      if (m.weight) {
        const float* w = m.weight.row(0);
        for (int64_t j = 0; j < m.size; j++) dweight[j] += sum[j] * u[j];
        for (int64_t j = 0; j < m.size; j++) sum[j] *= w[j];
        for (int64_t j = 0; j < m.size; j++) mean += sum[j] * u[j];
        mean /= m.size, scale = inverse[g];
      }
      T* out = dx + (i * m.groups + g) * m.size;
      for (int64_t j = 0; j < m.size; j++) out[j] = static_cast<T>(scale * (sum[j] - u[j] * mean));
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> trapezoid_keys(Tensor c, Tensor b, Tensor angle, OptionalTensor query, OptionalTensor query_bias,
                                                  OptionalTensor key, OptionalTensor key_bias, Tensor cos, Tensor sin, double eps) {
  const int64_t angles = angle.size(2), pairs = angle.size(3);
  const auto options = c.options().dtype(at::kFloat);
  Tensor q, k, dot;
  by_type(c, [&](auto entry) {
    using T = decltype(entry);
    const Side<T> queries(c, query, query_bias, angles), keys(b, key, key_bias, angles);
    const Rows2<float> co(cos.flatten(2)), si(sin.flatten(2));
    const int64_t heads = queries.heads, size = queries.size;
    q = at::empty({c.size(0), c.size(1), heads, size}, options), k = at::empty_like(q);
    dot = at::empty({c.size(0), c.size(1), heads}, options);
    float *pq = q.data_ptr<float>(), *pk = k.data_ptr<float>(), *pd = dot.data_ptr<float>();
    each_block(queries.x.rows, [&](int64_t, int64_t from, int64_t to) {
      Token<T> of_query(queries), of_key(keys);
      for (int64_t i = from; i < to; i++) {
        of_query.forward(i, co.row(i), si.row(i), angles, pairs, static_cast<float>(eps));
        of_key.forward(i, co.row(i), si.row(i), angles, pairs, static_cast<float>(eps));
        std::copy(of_query.out.begin(), of_query.out.end(), pq + i * heads * size);
        std::copy(of_key.out.begin(), of_key.out.end(), pk + i * heads * size);
        for (int64_t h = 0; h < heads; h++) {
          float total = 0.f;
          for (int64_t j = h * size; j < (h + 1) * size; j++) total += of_query.out[j] * of_key.out[j];
          pd[i * heads + h] = total;
        }
      }
    });
  });
  return {q, k, dot};
}

std::vector<Tensor> trapezoid_keys_backward(Tensor dq, Tensor dk, Tensor ddot, Tensor c, Tensor b, Tensor angle,
                                            OptionalTensor query, OptionalTensor query_bias, OptionalTensor key, OptionalTensor key_bias, Tensor cos,
                                            Tensor sin, double eps) {
  const int64_t angles = angle.size(2), pairs = angle.size(3), turns = angles * pairs;
  Tensor dc = like(c), db = like(b), dangle = at::zeros(angle.sizes(), dq.options());
  std::vector<Tensor> grads = {dc, db, dangle};
  by_type(c, [&](auto entry) {
    using T = decltype(entry);
    const Side<T> queries(c, query, query_bias, angles), keys(b, key, key_bias, angles);
    const Rows2<float> co(cos.flatten(2)), si(sin.flatten(2)), gq(dq.flatten(2)), gk(dk.flatten(2)), gd(ddot);
    const int64_t heads = queries.heads, size = queries.size, width = heads * size, parameters = size + width;
    Tensor sums = at::zeros({blocks(queries.x.rows), 2 * parameters}, dq.options());
    each_block(queries.x.rows, [&](int64_t block, int64_t from, int64_t to) {
      Token<T> of_query(queries), of_key(keys);
      std::vector<float> of_q(width), of_k(width);
      float *first = sums.data_ptr<float>() + block * 2 * parameters, *second = first + parameters;
      for (int64_t i = from; i < to; i++) {
        of_query.forward(i, co.row(i), si.row(i), angles, pairs, static_cast<float>(eps));
        of_key.forward(i, co.row(i), si.row(i), angles, pairs, static_cast<float>(eps));
        for (int64_t h = 0; h < heads; h++) {
          const float d = gd.row(i)[h];
          for (int64_t j = h * size; j < (h + 1) * size; j++) {
            of_q[j] = gq.row(i)[j] + d * of_key.out[j];
            of_k[j] = gk.row(i)[j] + d * of_query.out[j];
          }
        }
        float* da = dangle.data_ptr<float>() + i * turns;
        of_query.backward(i, of_q.data(), co.row(i), si.row(i), angles, pairs, dc.data_ptr<T>(), da, first,
                          first + size);
        of_key.backward(i, of_k.data(), co.row(i), si.row(i), angles, pairs, db.data_ptr<T>(), da, second,
                        second + size);
      }
    });
    const Tensor total = sum_of_blocks(sums);
    for (const auto& [side, at] : {std::pair{query, int64_t(0)}, {key, parameters}}) {
      grads.push_back(side ? total.slice(0, at, at + size) : nothing(dq));
      grads.push_back(side ? total.slice(0, at + size, at + parameters).view({heads, size}) : nothing(dq));
    }
  });
  return grads;
}

// ----------------------------------------------------------------------------------------------------- output

// Rows are tokens: o, v and z [H · V], dot and gain [H], and skip is one row [H].
template <class T>
struct Output {
  Rows2<T> o, v, z;
  Rows2<float> dot, gain, skip;
  int64_t heads, size;

  Output(const Tensor& o_, const Tensor& v_, const Tensor& dot_, const Tensor& gain_, const OptionalTensor& skip_,
         const OptionalTensor& z_)
      : o(o_.flatten(2)), v(v_.flatten(2)), z(z_), dot(dot_), gain(gain_), skip(skip_), heads(o_.size(2)),
        size(o_.size(3)) {}

  float factor(int64_t i, int64_t h) const {
    return gain.row(i)[h] * dot.row(i)[h] + (skip ? skip.row(0)[h] : 0.f);
  }
};

Tensor trapezoid_output(Tensor o, Tensor v, Tensor dot, Tensor gain, OptionalTensor skip, OptionalTensor z) {
  Tensor y = at::empty({o.size(0), o.size(1), o.size(2) * o.size(3)}, o.options());
  by_type(o, [&](auto entry) {
    using T = decltype(entry);
    const Output<T> m(o, v, dot, gain, skip, z);
    const Rows2<T> out(y);
    each_block(m.o.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < m.heads; h++) {
          const Vec factor(m.factor(i, h));
          for (int64_t j = 0; j < m.size; j += kWidth) {
            const int64_t n = lanes(j, m.size), at = h * m.size + j;
            Vec x = at::vec::fmadd(factor, read(m.v.row(i) + at, n), read(m.o.row(i) + at, n));
            if (m.z) x = x * silu(read(m.z.row(i) + at, n));
            write(out.row(i) + at, x, n);
          }
        }
    });
  });
  return y;
}

std::vector<Tensor> trapezoid_output_backward(Tensor dy, Tensor o, Tensor v, Tensor dot, Tensor gain, OptionalTensor skip,
                                              OptionalTensor z) {
  Tensor d_o = like(o), dv = like(v), dz = z ? like(*z) : nothing(o);
  Tensor ddot = like(dot), dgain = like(gain);
  Tensor sums = at::zeros({blocks(o.size(0) * o.size(1)), o.size(2)}, ddot.options());
  by_type(o, [&](auto entry) {
    using T = decltype(entry);
    const Output<T> m(o, v, dot, gain, skip, z);
    const Rows2<T> grad(dy), of_o(d_o.flatten(2)), of_v(dv.flatten(2)), of_z(dz);
    float *pd = ddot.data_ptr<float>(), *pg = dgain.data_ptr<float>();
    each_block(m.o.rows, [&](int64_t block, int64_t from, int64_t to) {
      float* dskip = sums.data_ptr<float>() + block * m.heads;
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < m.heads; h++) {
          const Vec factor(m.factor(i, h));
          Vec total(0.f);
          for (int64_t j = 0; j < m.size; j += kWidth) {
            const int64_t n = lanes(j, m.size), at = h * m.size + j;
            Vec g = read(grad.row(i) + at, n);
            const Vec value = read(m.v.row(i) + at, n);
            if (m.z) {
              const Vec a = read(m.z.row(i) + at, n), s = sigmoid(a);
              const Vec x = at::vec::fmadd(factor, value, read(m.o.row(i) + at, n));
              write(of_z.row(i) + at, g * x * silu_slope(a, s), n);
              g = g * a * s;
            }
            write(of_o.row(i) + at, g, n);
            write(of_v.row(i) + at, g * factor, n);
            total = at::vec::fmadd(g, value, total);
          }
          const float d = sum(total);
          pd[i * m.heads + h] = d * m.gain.row(i)[h], pg[i * m.heads + h] = d * m.dot.row(i)[h];
          dskip[h] += d;
        }
    });
  });
  return {d_o, dv, ddot, dgain, skip ? sum_of_blocks(sums) : nothing(ddot), dz};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "trapezoid_keys(Tensor c, Tensor b, Tensor angle, Tensor? query, Tensor? query_bias, Tensor? key, "
      "Tensor? key_bias, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor, Tensor)",
      torch::dispatch(at::kCPU, trapezoid_keys));
  m.def(
      "trapezoid_keys_backward(Tensor dq, Tensor dk, Tensor ddot, Tensor c, Tensor b, Tensor angle, Tensor? query, "
      "Tensor? query_bias, Tensor? key, Tensor? key_bias, Tensor cos, Tensor sin, float eps) -> Tensor[]",
      torch::dispatch(at::kCPU, trapezoid_keys_backward));
  m.def(
      "trapezoid_output(Tensor o, Tensor v, Tensor dot, Tensor gain, Tensor? skip, Tensor? z) -> Tensor",
      torch::dispatch(at::kCPU, trapezoid_output));
  m.def(
      "trapezoid_output_backward(Tensor dy, Tensor o, Tensor v, Tensor dot, Tensor gain, Tensor? skip, Tensor? z) "
      "-> Tensor[]",
      torch::dispatch(at::kCPU, trapezoid_output_backward));
}

}  // namespace halflife
