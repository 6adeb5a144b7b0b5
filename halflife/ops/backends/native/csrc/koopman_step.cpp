// One token of spectral Koopman attention for all sequences and heads (`_step` of halflife/ops/koopman/op.py), without
// gradients. It reads by the inverse factor L⁻ᵀ, and then waits for its chunk or enters the sums.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "cholesky.h"
#include "entries.h"
#include "koopman.h"
#include "product.h"

namespace halflife {
namespace {

using at::Tensor;

constexpr int64_t kHeads = 4;  // heads that are worth a thread

// One matrix [rows, cols] of a tensor [N, H, rows, cols].
struct Part {
  float* data;
  int64_t rows, cols;

  Part(const Tensor& x, int64_t n, int64_t head)
      : data(x.data_ptr<float>() + (n * x.size(1) + head) * x.size(2) * x.size(3)), rows(x.size(2)), cols(x.size(3)) {}
  bool fits() const { return rows % kLane == 0 && cols % kLane == 0; }
  // The matrix with rows and columns of multiples of 16: as it stands, or copied into `memory`, whose rest is 0.
  Mat padded(const Mat& memory) const {
    if (fits()) return {data, rows, cols, cols};
    for (int64_t i = 0; i < rows; i++) std::copy_n(data + i * cols, cols, memory.row(i));
    return memory;
  }
  void store(const Mat& in) const {
    for (int64_t i = 0; i < rows; i++) std::copy_n(in.row(i), cols, data + i * cols);
  }
  // *this = from + left rightᵀ
  void add_product(const Part& from, const float* left, const float* right) const {
    for (int64_t i = 0; i < rows; i++) {
      const float weight = left[i];
      const float* in = from.data + i * cols;
      float* out = data + i * cols;
      for (int64_t j = 0; j < cols; j++) out[j] = in[j] + weight * right[j];
    }
  }
};

// The entry of one token: tensors [N, 1, H, D].
void load_row(float* out, const Tensor& x, int64_t n, int64_t head) {
  const int64_t offset = n * x.stride(0) + head * x.stride(2);
  halflife::load_row(x.scalar_type(), static_cast<const char*>(x.data_ptr()) + offset * x.element_size(), out, x.size(3));
}

void store_row(const float* in, const Tensor& x, int64_t n, int64_t head) {
  const int64_t offset = n * x.stride(0) + head * x.stride(2);
  halflife::store_row(x.scalar_type(), in, static_cast<char*>(x.data_ptr()) + offset * x.element_size(), x.size(3));
}

struct Operators {
  Tensor gram, transition, values, norm, inverse, gamma, mix;
  int64_t power;

  int64_t heads() const { return norm.size(1); }
  int64_t rank() const { return round_up(gram.size(2)); }
  int64_t width() const { return round_up(values.size(2)); }
};

// Scratch of a thread.
struct Scratch {
  explicit Scratch(const Operators& o)
      : inverse(o.rank(), o.rank()), matrix(o.rank(), o.rank()), lower(o.rank(), o.rank()),
        values(o.width(), o.rank()), rows(8, std::max(o.rank(), o.width())) {}
  float* row(int64_t i) const { return rows->row(i); }

  Buffer inverse, matrix, lower, values, rows;
};

float unit_of(float norm) { return is_unit(norm) ? norm : 1.f; }

void scale(float* out, const float* in, float weight, int64_t n) {
  const Vec w(weight);
  for (int64_t j = 0; j < n; j += Vec::size()) (w * Vec::loadu(in + j)).store(out + j);
}

// y = C ((1 − μ) x_0 + μ x_K), where `query` is q of one head.
void read(const Operators& o, int64_t n, int64_t head, Scratch& s, float* y, const float* query) {
  const int64_t rank = o.rank();
  const Mat inverse = Part(o.inverse, n, head).padded(s.inverse);
  const Mat transition = o.power > 0 ? Part(o.transition, n, head).padded(s.matrix) : Mat();
  const float unit = unit_of(o.norm.data_ptr<float>()[n * o.heads() + head]);
  const float gamma = o.gamma.data_ptr<float>()[head], mix = o.mix.data_ptr<float>()[head];
  float *first = s.row(0), *x = s.row(1), *right = s.row(2), *half = s.row(3);
  auto solve = [&](float* out) {
    sum_rows(half, inverse, right);
    row_products(out, inverse, half);
  };
  const Vec u(unit);
  for (int64_t j = 0; j < rank; j += Vec::size()) (Vec::loadu(query + j) / u).store(right + j);
  solve(first);
  std::copy_n(first, rank, x);
  for (int64_t i = 0; i < o.power; i++) {
    row_products(right, transition, x);
    scale(right, right, gamma / unit, rank);
    solve(x);
  }
  const Vec mu(mix);
  for (int64_t j = 0; j < rank; j += Vec::size()) {
    const Vec a = Vec::loadu(first + j);
    at::vec::fmadd(mu, Vec::loadu(x + j) - a, a).store(x + j);
  }
  row_products(y, Part(o.values, n, head).padded(s.values), x);
}

// Run `f(scratch, sequence, head)` for all.
template <class F>
void each_head(const Operators& o, F f) {
  at::parallel_for(0, o.norm.numel(), kHeads, [&](int64_t first, int64_t last) {
    Scratch scratch(o);
    for (int64_t i = first; i < last; i++) f(scratch, i / o.heads(), i % o.heads());
  });
}

// The token waits: y, and the pending keys, values and counts with it.
std::tuple<Tensor, Tensor, Tensor, Tensor> wait(
    Tensor q, Tensor k, Tensor v, Tensor gram, Tensor transition, Tensor values, Tensor norm, Tensor inverse,
    Tensor pending_keys, Tensor pending_values, Tensor pending, Tensor gamma, Tensor mix, int64_t power) {
  const Operators o{gram, transition, values, norm, inverse, gamma, mix, power};
  Tensor y = like(v);
  Tensor keys = pending_keys.clone(), rows = pending_values.clone(), count = pending + 1;
  const int64_t* slots = pending.data_ptr<int64_t>();
  each_head(o, [&](Scratch& s, int64_t n, int64_t head) {
    float *row = s.row(4), *out = s.row(5);
    load_row(row, q, n, head);
    read(o, n, head, s, out, row);
    store_row(out, y, n, head);
    load_row(row, k, n, head);
    store_row(row, keys.narrow(1, slots[n], 1), n, head);
    load_row(row, v, n, head);
    store_row(row, rows.narrow(1, slots[n], 1), n, head);
    std::fill_n(row, s.rows->cols, 0.f);
  });
  return {y, keys, rows, count};
}

// The token enters the sums: y, G, M, C, m², the last key and the inverse factor after it, and retries.
std::vector<Tensor> enter(Tensor q, Tensor k, Tensor v, Tensor gram, Tensor transition, Tensor values, Tensor norm,
                          Tensor last, Tensor inverse, Tensor gamma, Tensor mix, double ridge, int64_t power) {
  const Operators o{gram, transition, values, norm, inverse, gamma, mix, power};
  Tensor y = like(v);
  std::vector<Tensor> after;
  for (const Tensor& x : {gram, transition, values, norm, last, inverse}) after.push_back(at::empty_like(x));
  Tensor retries = at::zeros({norm.size(0), norm.size(1)}, norm.options().dtype(at::kLong));
  const int64_t width = last.size(2);
  each_head(o, [&](Scratch& s, int64_t n, int64_t head) {
    const int64_t at = n * o.heads() + head;
    float *row = s.row(4), *out = s.row(5), *key = s.row(6), *value = s.row(7);
    load_row(row, q, n, head);
    read(o, n, head, s, out, row);
    store_row(out, y, n, head);
    load_row(key, k, n, head);
    load_row(value, v, n, head);
    const float* previous = last.data_ptr<float>() + at * width;
    Part(after[0], n, head).add_product(Part(gram, n, head), key, key);
    Part(after[1], n, head).add_product(Part(transition, n, head), key, previous);
    Part(after[2], n, head).add_product(Part(values, n, head), value, key);
    std::copy_n(key, width, after[4].data_ptr<float>() + at * width);
    const float before = norm.data_ptr<float>()[at], squared = dot(key, key, o.rank());
    const bool grown = squared > before || std::isnan(squared);
    const float now = after[3].data_ptr<float>()[at] = grown ? squared : before;
    const Part result(after[5], n, head);
    if (grown) {
      const Mat sums = Part(after[0], n, head).padded(s.matrix);
      retries.data_ptr<int64_t>()[at] = factorise_gram(s.lower, sums, unit_of(now), ridge);
      upper_inverse(s.inverse, s.lower);
      result.store(s.inverse);
    } else {
      transpose(s.lower, Part(inverse, n, head).padded(s.inverse));
      scale(row, key, 1.f / std::sqrt(unit_of(now)), o.rank());
      rank_one(s.lower, row, s.row(0), s.row(1));
      transpose(s.matrix, s.lower);
      result.store(s.matrix);
    }
    // The rows behind a head size and the matrices behind a rank must stay 0 for the next head.
    for (int64_t i = 4; i < 8; i++) std::fill_n(s.row(i), s.rows->cols, 0.f);
    if (!result.fits())
      for (const Buffer* m : {&s.inverse, &s.matrix}) fill(*m, 0.f);
  });
  after.insert(after.begin(), y);
  after.push_back(retries.sum());
  return after;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "koopman_wait(Tensor q, Tensor k, Tensor v, Tensor gram, Tensor transition, Tensor values, Tensor norm, "
      "Tensor inverse, Tensor pending_keys, Tensor pending_values, Tensor pending, Tensor gamma, Tensor mix, int power) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      torch::dispatch(at::kCPU, wait));
  m.def(
      "koopman_enter(Tensor q, Tensor k, Tensor v, Tensor gram, Tensor transition, Tensor values, Tensor norm, "
      "Tensor last, Tensor inverse, Tensor gamma, Tensor mix, float ridge, int power) -> Tensor[]",
      torch::dispatch(at::kCPU, enter));
}

}  // namespace halflife
