// The passes of Mamba-3 MIMO (`mimo_products` and `mimo_output` in halflife/ops/trapezoid), with R queries, keys,
// values, gates and outputs a head:
//
//   u_r = y_r + Σ_s (A_rs w^x_s ⊙ x' + B_rs w^x_s ⊙ x),   out = Σ_r w^o_r ⊙ u_r ⊙ silu(w^z_r ⊙ z)
//
//   A_rs = w q_r · k'_s for s > r, else 0,   B_rs = γ q_r · k_s, and + D for r = s
//
// with A = later and B = now [R, R] of each token and head, and k' and x' the keys and the value of the token before.
#include <torch/library.h>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

// Rows are tokens: y [R · H · V], later and now [H · R · R], before, x and z [H · V]; weights are rows of r.
template <class T>
struct Mimo {
  Rows2<T> y, before, x, z;
  Rows2<float> later, now, values, gates, outputs;
  int64_t rank, heads, size;

  Mimo(const Tensor& y_, const Tensor& before_, const Tensor& x_, const Tensor& z_, const Tensor& later_,
       const Tensor& now_, const Tensor& values_, const Tensor& gates_, const Tensor& outputs_)
      : y(y_.flatten(2)), before(before_.flatten(2)), x(x_.flatten(2)), z(z_.flatten(2)), later(later_.flatten(2)),
        now(now_.flatten(2)), values(values_.flatten(1)), gates(gates_.flatten(1)), outputs(outputs_.flatten(1)),
        rank(y_.size(2)), heads(y_.size(3)), size(y_.size(4)) {}

  int64_t channels() const { return heads * size; }
};

// The n channels from `at` on of one token: w^x_s ⊙ x' and w^x_s ⊙ x for all s, then one u_r after the other.
template <class T>
struct Lanes {
  const Mimo<T>& m;
  std::vector<Vec> old_values, new_values;
  int64_t row = 0, at = 0, n = 0;
  const float *later = nullptr, *now = nullptr;
  Vec before, x, z;

  explicit Lanes(const Mimo<T>& m_) : m(m_), old_values(m_.rank), new_values(m_.rank) {}

  void read_at(int64_t row_, int64_t head, int64_t j) {
    row = row_, at = head * m.size + j, n = lanes(j, m.size);
    later = m.later.row(row) + head * m.rank * m.rank, now = m.now.row(row) + head * m.rank * m.rank;
    before = read(m.before.row(row) + at, n), x = read(m.x.row(row) + at, n), z = read(m.z.row(row) + at, n);
    for (int64_t s = 0; s < m.rank; s++) {
      const Vec weight = read(m.values.row(s) + at, n);
      old_values[s] = weight * before, new_values[s] = weight * x;
    }
  }
  Vec output(int64_t r) const {
    Vec u = read(m.y.row(row) + r * m.channels() + at, n);
    for (int64_t s = 0; s < m.rank; s++) {
      u = at::vec::fmadd(Vec(later[r * m.rank + s]), old_values[s], u);
      u = at::vec::fmadd(Vec(now[r * m.rank + s]), new_values[s], u);
    }
    return u;
  }
};

Tensor mimo_output(Tensor y, Tensor before, Tensor x, Tensor z, Tensor later, Tensor now, Tensor values, Tensor gates,
                   Tensor outputs) {
  Tensor out = like(x);
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Mimo<T> m(y, before, x, z, later, now, values, gates, outputs);
    T* o = out.data_ptr<T>();
    each_block(m.x.rows, [&](int64_t, int64_t from, int64_t to) {
      Lanes<T> part(m);
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < m.heads; h++)
          for (int64_t j = 0; j < m.size; j += kWidth) {
            part.read_at(i, h, j);
            Vec total(0.f);
            for (int64_t r = 0; r < m.rank; r++) {
              const Vec gate = silu(read(m.gates.row(r) + part.at, part.n) * part.z);
              total = at::vec::fmadd(read(m.outputs.row(r) + part.at, part.n) * gate, part.output(r), total);
            }
            write(o + i * m.channels() + part.at, total, part.n);
          }
    });
  });
  return out;
}

inline void accumulate(float* p, Vec x, int64_t n) { write(p, read(p, n) + x, n); }

std::vector<Tensor> mimo_output_backward(Tensor dout, Tensor y, Tensor before, Tensor x, Tensor z, Tensor later,
                                         Tensor now, Tensor values, Tensor gates, Tensor outputs) {
  Tensor dy = like(y), dlater = like(later), dnow = like(now), dbefore = like(before), dx = like(x), dz = like(z);
  const int64_t weights = values.numel(), rows = x.size(0) * x.size(1);
  Tensor sums = at::zeros({blocks(rows), 3 * weights}, x.options().dtype(at::kFloat));
  by_type(x, [&](auto entry) {
    using T = decltype(entry);
    const Mimo<T> m(y, before, x, z, later, now, values, gates, outputs);
    const Rows2<T> grad(dout.flatten(2));
    T *py = dy.data_ptr<T>(), *pb = dbefore.data_ptr<T>(), *px = dx.data_ptr<T>(), *pz = dz.data_ptr<T>();
    const int64_t square = m.rank * m.rank, channels = m.channels();
    each_block(m.x.rows, [&](int64_t block, int64_t from, int64_t to) {
      Lanes<T> part(m);
      std::vector<Vec> of_later(square), of_now(square), of_u(m.rank);
      float* dvalues = sums.data_ptr<float>() + block * 3 * weights;
      float *dgates = dvalues + weights, *doutputs = dgates + weights;
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < m.heads; h++) {
          std::fill(of_later.begin(), of_later.end(), Vec(0.f));
          std::fill(of_now.begin(), of_now.end(), Vec(0.f));
          for (int64_t j = 0; j < m.size; j += kWidth) {
            part.read_at(i, h, j);
            const int64_t at = part.at, n = part.n;
            const Vec g = read(grad.row(i) + at, n);
            Vec of_z(0.f), of_before(0.f), of_x(0.f);
            for (int64_t r = 0; r < m.rank; r++) {
              const Vec u = part.output(r), gate = read(m.gates.row(r) + at, n), a = gate * part.z, s = sigmoid(a);
              const Vec scaled = g * read(m.outputs.row(r) + at, n), du = scaled * a * s;
              const Vec da = scaled * u * silu_slope(a, s);
              accumulate(doutputs + r * channels + at, g * u * a * s, n);
              accumulate(dgates + r * channels + at, da * part.z, n);
              of_z = at::vec::fmadd(da, gate, of_z);
              write(py + (i * m.rank + r) * channels + at, du, n);
              of_u[r] = du;
              for (int64_t k = 0; k < m.rank; k++) {
                const int64_t rk = r * m.rank + k;
                of_later[rk] = at::vec::fmadd(du, part.old_values[k], of_later[rk]);
                of_now[rk] = at::vec::fmadd(du, part.new_values[k], of_now[rk]);
              }
            }
            for (int64_t k = 0; k < m.rank; k++) {
              Vec of_old(0.f), of_new(0.f);
              for (int64_t r = 0; r < m.rank; r++) {
                of_old = at::vec::fmadd(Vec(part.later[r * m.rank + k]), of_u[r], of_old);
                of_new = at::vec::fmadd(Vec(part.now[r * m.rank + k]), of_u[r], of_new);
              }
              const Vec weight = read(m.values.row(k) + at, n);
              accumulate(dvalues + k * channels + at, of_old * part.before + of_new * part.x, n);
              of_before = at::vec::fmadd(of_old, weight, of_before);
              of_x = at::vec::fmadd(of_new, weight, of_x);
            }
            write(pb + i * channels + at, of_before, n);
            write(px + i * channels + at, of_x, n);
            write(pz + i * channels + at, of_z, n);
          }
          float *l = dlater.data_ptr<float>() + (i * m.heads + h) * square;
          float *w = dnow.data_ptr<float>() + (i * m.heads + h) * square;
          for (int64_t k = 0; k < square; k++) l[k] = sum(of_later[k]), w[k] = sum(of_now[k]);
        }
    });
  });
  std::vector<Tensor> grads = {dy, dbefore, dx, dz, dlater, dnow};
  for (const Tensor& part : sum_of_blocks(sums).view({3, -1}).unbind()) grads.push_back(part.view(values.sizes()));
  return grads;
}

// Rows are tokens: q, k and before [R · H · K], weight and gain [H].
template <class T>
struct Keys {
  Rows2<T> q, k, before;
  Rows2<float> weight, gain;
  int64_t rank, heads, size;

  Keys(const Tensor& q_, const Tensor& k_, const Tensor& before_, const Tensor& weight_, const Tensor& gain_)
      : q(q_.flatten(2)), k(k_.flatten(2)), before(before_.flatten(2)), weight(weight_), gain(gain_), rank(q_.size(2)),
        heads(q_.size(3)), size(q_.size(4)) {}

  int64_t at(int64_t r, int64_t h) const { return (r * heads + h) * size; }
  int64_t width() const { return rank * heads * size; }
};

template <class T>
inline float dot_rows(const T* a, const T* b, int64_t size) {
  Vec total(0.f);
  for (int64_t j = 0; j < size; j += kWidth)
    total = at::vec::fmadd(read(a + j, lanes(j, size)), read(b + j, lanes(j, size)), total);
  return sum(total);
}

std::tuple<Tensor, Tensor> mimo_products(Tensor q, Tensor k, Tensor before, Tensor weight, Tensor gain, Tensor skip) {
  const int64_t rank = q.size(2), heads = q.size(3);
  Tensor later = at::empty({q.size(0), q.size(1), heads, rank, rank}, weight.options()), now = at::empty_like(later);
  skip = skip.contiguous();
  const float* d = skip.data_ptr<float>();
  by_type(q, [&](auto entry) {
    using T = decltype(entry);
    const Keys<T> m(q, k, before, weight, gain);
    float *pl = later.data_ptr<float>(), *pn = now.data_ptr<float>();
    each_block(m.q.rows, [&](int64_t, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < heads; h++)
          for (int64_t r = 0; r < rank; r++) {
            float *l = pl + ((i * heads + h) * rank + r) * rank, *n = pn + ((i * heads + h) * rank + r) * rank;
            const T* query = m.q.row(i) + m.at(r, h);
            const float w = m.weight.row(i)[h], own = m.gain.row(i)[h];
            for (int64_t s = 0; s < rank; s++) {
              l[s] = s > r ? w * dot_rows(query, m.before.row(i) + m.at(s, h), m.size) : 0.f;
              n[s] = own * dot_rows(query, m.k.row(i) + m.at(s, h), m.size) + (s == r ? d[h] : 0.f);
            }
          }
    });
  });
  return {later, now};
}

// With a_r = Σ_{s>r} dA_rs k'_s and b_r = Σ_s dB_rs k_s: dq_r = w a_r + γ b_r, dw = Σ_r q_r · a_r, dγ = Σ_r q_r · b_r.
std::vector<Tensor> mimo_products_backward(Tensor dlater, Tensor dnow, Tensor q, Tensor k, Tensor before, Tensor weight,
                                           Tensor gain, Tensor skip) {
  Tensor dq = like(q), dk = like(k), dbefore = like(before), dweight = like(weight), dgain = like(gain);
  const int64_t rank = q.size(2), heads = q.size(3), square = rank * rank;
  Tensor sums = at::zeros({blocks(q.size(0) * q.size(1)), heads}, skip.options());
  dlater = dlater.contiguous(), dnow = dnow.contiguous();
  by_type(q, [&](auto entry) {
    using T = decltype(entry);
    const Keys<T> m(q, k, before, weight, gain);
    T *pq = dq.data_ptr<T>(), *pk = dk.data_ptr<T>(), *pb = dbefore.data_ptr<T>();
    float *pw = dweight.data_ptr<float>(), *pg = dgain.data_ptr<float>();
    each_block(m.q.rows, [&](int64_t block, int64_t from, int64_t to) {
      std::vector<Vec> query(rank), key(rank), old(rank);
      float* dskip = sums.data_ptr<float>() + block * heads;
      for (int64_t i = from; i < to; i++)
        for (int64_t h = 0; h < heads; h++) {
          const float* l = dlater.data_ptr<float>() + (i * heads + h) * square;
          const float* n = dnow.data_ptr<float>() + (i * heads + h) * square;
          const Vec w(m.weight.row(i)[h]), own(m.gain.row(i)[h]);
          Vec of_weight(0.f), of_gain(0.f);
          for (int64_t j = 0; j < m.size; j += kWidth) {
            const int64_t count = lanes(j, m.size);
            for (int64_t r = 0; r < rank; r++) {
              const int64_t at = m.at(r, h) + j;
              query[r] = read(m.q.row(i) + at, count), key[r] = read(m.k.row(i) + at, count);
              old[r] = read(m.before.row(i) + at, count);
            }
            for (int64_t r = 0; r < rank; r++) {
              const int64_t at = i * m.width() + m.at(r, h) + j;
              Vec a(0.f), b(0.f), of_key(0.f), of_old(0.f);
              for (int64_t s = 0; s < rank; s++) {
                b = at::vec::fmadd(Vec(n[r * rank + s]), key[s], b);
                of_key = at::vec::fmadd(Vec(n[s * rank + r]), query[s], of_key);
              }
              for (int64_t s = r + 1; s < rank; s++) a = at::vec::fmadd(Vec(l[r * rank + s]), old[s], a);
              for (int64_t s = 0; s < r; s++) of_old = at::vec::fmadd(Vec(l[s * rank + r]), query[s], of_old);
              write(pq + at, at::vec::fmadd(w, a, own * b), count);
              write(pk + at, own * of_key, count);
              write(pb + at, w * of_old, count);
              of_weight = at::vec::fmadd(query[r], a, of_weight);
              of_gain = at::vec::fmadd(query[r], b, of_gain);
            }
          }
          pw[i * heads + h] = sum(of_weight), pg[i * heads + h] = sum(of_gain);
          for (int64_t r = 0; r < rank; r++) dskip[h] += n[r * rank + r];
        }
    });
  });
  return {dq, dk, dbefore, dweight, dgain, sum_of_blocks(sums)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "mimo_output(Tensor y, Tensor before, Tensor x, Tensor z, Tensor later, Tensor now, Tensor values, "
      "Tensor gates, Tensor outputs) -> Tensor",
      torch::dispatch(at::kCPU, mimo_output));
  m.def(
      "mimo_output_backward(Tensor dout, Tensor y, Tensor before, Tensor x, Tensor z, Tensor later, Tensor now, "
      "Tensor values, Tensor gates, Tensor outputs) -> Tensor[]",
      torch::dispatch(at::kCPU, mimo_output_backward));
  m.def(
      "mimo_products(Tensor q, Tensor k, Tensor before, Tensor weight, Tensor gain, Tensor skip) -> (Tensor, Tensor)",
      torch::dispatch(at::kCPU, mimo_products));
  m.def(
      "mimo_products_backward(Tensor dlater, Tensor dnow, Tensor q, Tensor k, Tensor before, Tensor weight, "
      "Tensor gain, Tensor skip) -> Tensor[]",
      torch::dispatch(at::kCPU, mimo_products_backward));
}

}  // namespace halflife
