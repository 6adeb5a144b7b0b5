// One token of an op on a state, for decoding: the token loops of halflife/ops in one pass (two for the delta rule and
// DPLR) over the state of each head.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "decay.h"
#include "entries.h"

namespace halflife {
namespace {

using at::Tensor;

// The row of one sequence and head of a tensor [N, 1, H, D] or [N, 1, H] in float32, or of its group [N, 1, G, D].
std::vector<float> row_of(const Tensor& x, int64_t n, int64_t head, int64_t heads) {
  const int64_t width = x.dim() == 4 ? x.size(3) : 1;
  const int64_t offset = n * x.stride(0) + head * x.size(2) / heads * x.stride(2);
  std::vector<float> out(width);
  load_row(x.scalar_type(), static_cast<const char*>(x.data_ptr()) + offset * x.element_size(), out.data(), width);
  return out;
}


// f(first, count) for pieces of `n` columns that fit into a vector.
template <class F>
void vectors(int64_t n, F f) {
  for (int64_t j = 0; j < n; j += Vec::size()) f(j, std::min<int64_t>(Vec::size(), n - j));
}

// out = Σ_d weights_d S_d over the rows of a state [K, V].
void read(const float* state, const std::vector<float>& weights, std::vector<float>& out) {
  const int64_t values = out.size();
  vectors(values, [&](int64_t j, int64_t count) {
    Vec sum(0.f);
    for (size_t d = 0; d < weights.size(); d++)
      sum = at::vec::fmadd(Vec::loadu(state + d * values + j, count), Vec(weights[d]), sum);
    sum.store(out.data() + j, count);
  });
}

struct Token {
  std::vector<float> q, k, v;
  std::vector<float> kept, change;  // the decay of each channel, split

  Token(std::vector<float> q, std::vector<float> k, std::vector<float> v)
      : q(std::move(q)), k(std::move(k)), v(std::move(v)), kept(this->k.size(), 1.f), change(this->k.size(), 0.f) {}

  void set_decay(const std::vector<float>& g) {
    Split split;
    for (size_t d = 0; d < k.size(); d++) {
      if (d < g.size()) split = Split(g[d]);  // a scalar decay is that of all channels
      kept[d] = split.kept;
      change[d] = split.change;
    }
  }
  std::vector<float> decayed_key() const {
    std::vector<float> out(k.size());
    for (size_t d = 0; d < k.size(); d++) out[d] = k[d] * (kept[d] + change[d]);
    return out;
  }
};

// new_d = decay_d old_d + k_d v (+ b_d c), and out = Σ_d q_d new_d.
void write(const Token& t, const float* old, float* now, const std::vector<float>* b, const std::vector<float>* c,
           std::vector<float>& out) {
  const int64_t values = t.v.size();
  vectors(values, [&](int64_t j, int64_t count) {
    const Vec v = Vec::loadu(t.v.data() + j, count), corrected = c ? Vec::loadu(c->data() + j, count) : Vec(0.f);
    Vec sum(0.f);
    for (size_t d = 0; d < t.k.size(); d++) {
      const Vec before = Vec::loadu(old + d * values + j, count);
      Vec added = Vec(t.k[d]) * v;
      if (b) added = at::vec::fmadd(Vec((*b)[d]), corrected, added);
      const Vec s = decay_and_add(before, Vec(t.kept[d]), Vec(t.change[d]), added);
      s.store(now + d * values + j, count);
      sum = at::vec::fmadd(s, Vec(t.q[d]), sum);
    }
    sum.store(out.data() + j, count);
  });
}

// GateRank: at a reset the slow state decays and takes over the decayed fast one, which then starts at 0. Without one
// the slow state stays, and the fast one decays when the token is written.
void reset(Token& t, const float* old, float* slow_now, int64_t size, float slow, float fast) {
  if (slow == 0.f) {
    std::copy_n(old + size, size, slow_now);
    return t.set_decay({fast});
  }
  const Split split(slow);
  const float merged = std::exp(slow + fast);
  for (int64_t i = 0; i < size; i++)
    slow_now[i] = split.kept * old[size + i] + (split.change * old[size + i] + merged * old[i]);
  t.set_decay({-INFINITY});
}

// out += qᵀ S_n for all states but the first.
void add_slower(const float* state, const std::vector<float>& q, int64_t size, int64_t states, std::vector<float>& out) {
  std::vector<float> held(out.size());
  for (int64_t n = 1; n < states; n++) {
    read(state + n * size, q, held);
    for (size_t j = 0; j < out.size(); j++) out[j] += held[j];
  }
}

std::tuple<Tensor, Tensor> step(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                                OptionalTensor a, OptionalTensor b, OptionalTensor g_slow, OptionalTensor gain,
                                Tensor state, double scale) {
  const int64_t sequences = q.size(0), heads = v.size(2), keys = q.size(3), values = v.size(3), size = keys * values;
  const int64_t states = g_slow ? 2 : 1;
  Tensor o = like(v), next = at::empty_like(state);
  const float* before = state.data_ptr<float>();
  float* after = next.data_ptr<float>();
  auto row = [heads](const Tensor& x, int64_t n, int64_t head) { return row_of(x, n, head, heads); };
  at::parallel_for(0, sequences * heads, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(size * states, 1)),
                   [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t n = i / heads, head = i % heads;
      const float* old = before + i * size * states;
      float* now = after + i * size * states;
      Token t{row(q, n, head), row(k, n, head), row(v, n, head)};
      std::vector<float> out(values), held(values);
      if (gain) {
        const float factor = row(*gain, n, head)[0];
        for (float& x : t.v) x *= factor;
      }
      if (g_slow) {
        reset(t, old, now + size, size, row(*g_slow, n, head)[0], row(*g, n, head)[0]);
      } else if (g) {
        t.set_decay(row(*g, n, head));
      }
      if (beta) {
        read(old, t.decayed_key(), held);
        add_slower(now, t.k, size, states, held);
        const float strength = row(*beta, n, head)[0];
        for (int64_t j = 0; j < values; j++) t.v[j] = strength * (t.v[j] - held[j]);
      }
      if (a) {
        read(old, row(*a, n, head), held);
        const auto direction = row(*b, n, head);
        write(t, old, now, &direction, &held, out);
      } else {
        write(t, old, now, nullptr, nullptr, out);
      }
      add_slower(now, t.q, size, states, out);
      for (float& x : out) x *= static_cast<float>(scale);
      store_row(o.scalar_type(), out.data(), static_cast<char*>(o.data_ptr()) + i * values * o.element_size(), values);
    }
  });
  return {o, next};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "state_step(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, "
      "Tensor? g_slow, Tensor? gain, Tensor state, float scale) -> (Tensor, Tensor)",
      torch::dispatch(at::kCPU, step));
}

}  // namespace halflife
