#include <ATen/ATen.h>

#include <cmath>

#include "cholesky.h"
#include "koopman.h"
#include "product.h"

namespace halflife {
namespace {

bool finite(const Mat& m) {
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t j = 0; j < m.cols; j++)
      if (!std::isfinite(m.row(i)[j])) return false;
  return true;
}

float dot(const Mat& a, const Mat& b) {
  Vec s(0.f);
  for (int64_t i = 0; i < a.rows; i++)
    for (int64_t j = 0; j < a.cols; j += Vec::size())
      s = at::vec::fmadd(Vec::loadu(a.row(i) + j), Vec::loadu(b.row(i) + j), s);
  return sum(s);
}

void scale(const Mat& m, float weight) {
  const Vec w(weight);
  each([w](Vec x) { return w * x; }, m);
}

}  // namespace

void row_products(float* out, const Mat& m, const float* x) {
  for (int64_t i = 0; i < m.rows; i++) out[i] = dot(m.row(i), x, m.cols);
}

void sum_rows(float* out, const Mat& m, const float* weights) {
  constexpr int64_t kVecs = kLane / Vec::size();
  for (int64_t j = 0; j < m.cols; j += kLane) {
    Vec even[kVecs], odd[kVecs];
    for (int64_t v = 0; v < kVecs; v++) even[v] = odd[v] = Vec(0.f);
    for (int64_t i = 0; i < m.rows; i += 2)
      for (int64_t v = 0; v < kVecs; v++) {
        const int64_t at = j + v * Vec::size();
        even[v] = at::vec::fmadd(Vec(weights[i]), Vec::loadu(m.row(i) + at), even[v]);
        odd[v] = at::vec::fmadd(Vec(weights[i + 1]), Vec::loadu(m.row(i + 1) + at), odd[v]);
      }
    for (int64_t v = 0; v < kVecs; v++) (even[v] + odd[v]).store(out + j + v * Vec::size());
  }
}

int64_t factorise_gram(const Mat& factor, const Mat& gram, float unit, double ridge) {
  constexpr double kJitter = 1e-4;  // JITTER of solve.py
  int64_t retries = 0;
  for (double jitter = 0, next = kJitter;; jitter = next, next *= 10) {
    const Vec u(unit);
    each([u](Vec, Vec g) { return g / u; }, factor, gram);
    for (int64_t i = 0; i < factor.rows; i++)
      factor.row(i)[i] = (factor.row(i)[i] + static_cast<float>(ridge)) + static_cast<float>(jitter);
    if (cholesky(factor)) return retries;
    retries++;
    each([u](Vec, Vec g) { return g / u; }, factor, gram);
    TORCH_CHECK_VALUE(next <= 1 && finite(factor),
                      "keys of koopman_attention are not finite: their Gram matrix cannot be factorised");
  }
}

void rank_one(const Mat& lower, const float* z, float* w, float* sums) {
  const int64_t n = lower.rows;
  row_products(w, lower, z);
  // Row i becomes √(s_i / s_{i−1}) row_i − w_i / √(s_i s_{i−1}) Σ_{j ≤ i} w_j row_j, with s_i = 1 + Σ_{j ≤ i} w_j².
  alignas(64) float after[kLane], before[kLane], keep[kLane], take[kLane];
  float s = 1.f;
  std::fill_n(sums, n, 0.f);
  for (int64_t p = 0; p < n; p += kLane) {
    for (int64_t i = 0; i < kLane; i++) {
      before[i] = s;
      after[i] = s += w[p + i] * w[p + i];
    }
    for (int64_t j = 0; j < kLane; j += Vec::size()) {
      const Vec a = Vec::loadu(after + j), b = Vec::loadu(before + j);
      (a / b).sqrt().store(keep + j);
      (Vec::loadu(w + p + j) / (a * b).sqrt()).neg().store(take + j);
    }
    const int64_t width = p + kLane;  // the rows are 0 behind it
    for (int64_t i = 0; i < kLane; i++) {
      float* row = lower.row(p + i);
      const Vec weight(w[p + i]), k(keep[i]), t(take[i]);
      for (int64_t j = 0; j < width; j += Vec::size()) {
        const Vec x = Vec::loadu(row + j), total = at::vec::fmadd(weight, x, Vec::loadu(sums + j));
        total.store(sums + j);
        at::vec::fmadd(t, total, k * x).store(row + j);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------- what blocks share

KoopmanSlot::KoopmanSlot(const KoopmanSizes& n, bool grads, bool tokens) : sums(n.rank, n.columns()) {
  if (!grads) return;
  dbefore.resize(n.rank);
  dlast.resize(n.rank);
  if (tokens)
    for (auto* m : {&xs, &bs}) *m = Buffer((n.power + 1) * n.rows, n.rank);
}

KoopmanBlock::KoopmanBlock(const KoopmanSizes& sizes, bool grads)
    : n(sizes), tokens(n.rows, n.columns()), q(n.rows, n.rank), y(n.rows, n.width),
      factor(n.rank, n.rank), transposed(n.rank, (n.power + 1) * n.rows), mixed(n.rows, n.rank),
      right(n.rows, n.rank) {
  if (!grads) return;
  dy = Buffer(n.rows, n.width);
  dq = Buffer(n.rows, n.rank);
  dtokens = Buffer(n.rows, n.columns());
}

float KoopmanBlock::unit_of(float norm) const {
  const float m2 = settings.whole_sequence ? settings.largest : norm;
  return is_unit(m2) ? m2 : 1.f;
}

void KoopmanBlock::sum_tokens(const Mat& out) {
  const Mat keys = transposed->col_range(0, n.rows);
  transpose(keys, tokens->col_range(0, n.rank));
  product_nn(n.tokens, out, keys, tokens);
  ahead.fetch();
}

void KoopmanBlock::largest_norm(KoopmanSlot& slot, int64_t count) const {
  slot.largest = -1.f;
  for (int64_t i = 0; i < count; i++) {
    const float norm = halflife::dot(tokens->row(i), tokens->row(i), n.rank);
    if (norm >= slot.largest || std::isnan(norm)) slot.largest = norm, slot.row = i;
  }
}

void KoopmanBlock::factorise(const Mat& gram, float unit) {
  retries += factorise_gram(factor, gram, unit, settings.ridge);
}

void KoopmanBlock::mix(const Mat& out, const Mat& first, const Mat& last) const {
  const Vec mu(settings.mix);
  each([mu](Vec, Vec a, Vec b) { return at::vec::fmadd(mu, b - a, a); }, out, first, last);
}

void KoopmanBlock::gradient_of_sums(const Mat& sums, const Mat& xs, const Mat& bs) {
  transpose(transposed, bs);
  const Mat dgram = sums.col_range(0, n.rank), dtransition = sums.col_range(n.rank, n.rank);
  product_nn(kSingle, dgram, transposed, xs);
  ahead.fetch();
  each([](Vec x) { return x.neg(); }, dgram);
  const int64_t later = n.power * n.rows;
  if (later > 0) {
    product_nn(kSingle, dtransition, transposed->col_range(n.rows, later), xs.row_range(0, later));
    scale(dtransition, settings.gamma);
    ahead.fetch();
  } else {
    fill(dtransition, 0.f);
  }
  product_tn(kSingle, sums.col_range(2 * n.rank, n.width), mixed, dy);
}

namespace {

// --------------------------------------------------------------------------------- one operator for all tokens

// All powers are products with one matrix `step` = Mᵀ G̃⁻¹, because x_i = γ x_{i−1} Mᵀ G̃⁻¹ for rows. G̃⁻¹ is applied as
// its two triangular factors: its explicit entries would lose the gradients of keys that span only a few directions.
class SharedOperator final : public KoopmanBlock {
 public:
  SharedOperator(const KoopmanSizes& sizes, bool grads)
      : KoopmanBlock(sizes, grads), upper(n.rank, n.rank), lower(n.rank, n.rank), step(n.rank, n.rank),
        half((n.power + 1) * n.rows, n.rank), xs((n.power + 1) * n.rows, n.rank) {
    if (grads) bs = Buffer((n.power + 1) * n.rows, n.rank), dxs = Buffer((n.power + 1) * n.rows, n.rank);
  }

  void fit(const KoopmanSlot& slot) override {
    const float unit = unit_of(slot.norm);
    factorise(slot.sums->col_range(0, n.rank), unit);
    ahead.fetch();
    upper_inverse(upper, factor);
    ahead.fetch();
    transpose(lower, upper);
    const Vec u(unit);
    each([u](Vec v) { return v / u; }, Mat(lower));
    if (n.power > 0) {
      product_tn(kSingle, factor, slot.sums->col_range(n.rank, n.rank), upper);
      ahead.fetch();
      product_nn(kSingle, step, factor, lower);
      ahead.fetch();
    }
  }

  void read(const KoopmanSlot& slot, int64_t) override {
    solve_all();
    product_nn(kSingle, y, mixed, slot.sums->col_range(2 * n.rank, n.width));
  }

  void read_grad(KoopmanSlot& slot, const KoopmanSlot& fitted, int64_t) override {
    solve_all();
    product_nt(kSingle, right, dy, fitted.sums->col_range(2 * n.rank, n.width));  // the gradient of the mixed x
    ahead.fetch();
    slot.dmix = dot(right, x(n.power)) - dot(right, x(0));
    slot.dgamma = 0;
    const Vec mu(settings.mix), rest(1.f - settings.mix), gamma(settings.gamma);
    each([mu](Vec, Vec d) { return mu * d; }, dx(n.power), Mat(right));
    for (int64_t i = n.power; i > 0; i--) {
      product_nt(kSingle, dx(i - 1), dx(i), step);
      ahead.fetch();
      slot.dgamma += dot(dx(i - 1), x(i - 1));
      scale(dx(i - 1), settings.gamma);
    }
    each([rest](Vec d, Vec m) { return at::vec::fmadd(rest, m, d); }, dx(0), Mat(right));
    solve(bs, dxs);
    copy(dq, bs->row_range(0, n.rows));
    gradient_of_sums(slot.sums, xs, bs);
    double trace = 0;
    for (int64_t i = 0; i < n.rank; i++) trace += slot.sums->row(i)[i];
    const float m2 = settings.whole_sequence ? settings.largest : fitted.norm;
    const double dunit = is_unit(m2) ? settings.ridge * trace : 0;
    slot.dentering = settings.whole_sequence ? 0 : dunit;
    slot.dlargest = settings.whole_sequence ? dunit : 0;
  }

  // With z' = z_{t−1}: dz = z (dG + dGᵀ) + z' dMᵀ + v dC, dz' = z dM and dv = z dCᵀ.
  void sums_grad(KoopmanSlot& slot, int64_t) override {
    const Mat keys = tokens->col_range(0, n.rank), dkeys = dtokens->col_range(0, n.rank);
    const Mat dprevious = dtokens->col_range(n.rank, n.rank), dgram = slot.sums->col_range(0, n.rank);
    transpose(step, dgram);
    add(dgram, step);
    product_nn(kSingle, dtokens, keys, slot.sums);
    const int64_t others = n.rank + n.width;
    product_nt(kSingle, dkeys, tokens->col_range(n.rank, others), slot.sums->col_range(n.rank, others), true);
    add(dkeys.row_range(0, n.rows - 1), dprevious.row_range(1, n.rows - 1));
    std::copy_n(dprevious.row(0), n.rank, slot.dbefore.begin());
    if (slot.record()) {
      const float weight = 2 * slot.dnorm;
      add_scaled_rows(dkeys.row_range(slot.row, 1), keys.row_range(slot.row, 1), &weight);
    }
  }

 private:
  Mat x(int64_t i) const { return xs->row_range(i * n.rows, n.rows); }
  Mat dx(int64_t i) const { return dxs->row_range(i * n.rows, n.rows); }

  // out = d G̃⁻¹ for rows d.
  void solve(const Mat& out, const Mat& d) {
    const Mat middle = half->row_range(0, d.rows);
    product_nn(kSingle, middle, d, upper);
    ahead.fetch();
    product_nn(kSingle, out, middle, lower);
    ahead.fetch();
  }

  void solve_all() {
    solve(x(0), q);
    for (int64_t i = 1; i <= n.power; i++) {
      product_nn(kSingle, x(i), x(i - 1), step);
      ahead.fetch();
      scale(x(i), settings.gamma);
    }
    mix(mixed, x(0), x(n.power));
  }

  Buffer upper, lower, step, half, xs, bs, dxs;
};

// ------------------------------------------------------------------------------------------ one operator a token

// Sums and the inverse factor L⁻¹ follow from token to token by rank-one updates. Where m² grows, the unit changes, and
// the factor is computed from the sums.
class TokenOperators final : public KoopmanBlock {
 public:
  TokenOperators(const KoopmanSizes& sizes, bool grads)
      : KoopmanBlock(sizes, grads), sums(n.rank, n.columns()), lower(n.rank, n.rank), upper(n.rank, n.rank),
        scratch(6, n.columns()), entering(n.rows), forward_xs((n.power + 1) * n.rows, n.rank) {}

  void read(const KoopmanSlot& slot, int64_t count) override {
    begin(slot);
    for (int64_t t = 0; t < count; t++) {
      solve_all(forward_xs, t);
      sum_rows(y->row(t), sums->col_range(2 * n.rank, n.width), mixed->row(t));
      if (t + 1 < count) push(t);
    }
  }

  void read_grad(KoopmanSlot& slot, const KoopmanSlot&, int64_t count) override {
    begin(slot);
    slot.dgamma = slot.dmix = slot.dentering = slot.dlargest = 0;
    bool recorded = false;
    for (auto* m : {&slot.xs, &slot.bs}) fill(*m, 0.f);
    fill(mixed, 0.f);
    fill(dq, 0.f);
    for (int64_t t = 0; t < count; t++) {
      solve_all(slot.xs, t);
      const double dunit = solve_back(slot, t);
      if (settings.whole_sequence)
        slot.dlargest += dunit;
      else if (!recorded)
        slot.dentering += dunit;
      if (squared_norm(t) >= norm) recorded = true;
      if (t + 1 < count) push(t);
    }
    gradient_of_sums(slot.sums, slot.xs, slot.bs);
  }

  void sums_grad(KoopmanSlot& slot, int64_t count) override {
    const Mat d = slot.sums, dprevious = dtokens->col_range(n.rank, n.rank);
    float m2 = slot.norm, dm2 = slot.dnorm;
    for (int64_t t = 0; t < count; t++) entering[t] = m2, m2 = std::max(m2, squared_norm(t));
    float* rows = line(0);
    for (int64_t t = count - 1; t >= 0; t--) {
      const Mat dz = dtokens->row_range(t, 1).col_range(0, n.rank);
      sum_rows(dtokens->row(t), d, tokens->row(t));
      row_products(rows, d, tokens->row(t));
      add(dz, {rows, 1, n.rank, n.rank});
      if (t + 1 < count) add(dz, dprevious.row_range(t + 1, 1));
      if (squared_norm(t) >= entering[t]) {
        const float weight = 2 * dm2;
        add_scaled_rows(dz, tokens->row_range(t, 1).col_range(0, n.rank), &weight);
        dm2 = 0;
      }
      if (t > 0) {
        if (!settings.whole_sequence && is_unit(entering[t])) dm2 += static_cast<float>(settings.ridge * trace(slot, t));
        add_operator(slot, t);
      }
    }
    std::copy_n(dprevious.row(0), n.rank, slot.dbefore.begin());
  }

 private:
  float* line(int64_t i) const { return scratch->row(i); }
  float* x(const Mat& of, int64_t i, int64_t t) const { return of.row(i * n.rows + t); }
  float squared_norm(int64_t t) const { return halflife::dot(tokens->row(t), tokens->row(t), n.rank); }
  Mat vector(float* data) const { return {data, 1, n.rank, n.rank}; }

  void begin(const KoopmanSlot& slot) {
    copy(sums, slot.sums);
    norm = slot.norm;
    refactor();
  }
  void refactor() {
    factorise(sums->col_range(0, n.rank), unit_of(norm));
    upper_inverse(upper, factor);
    transpose(lower, upper);
  }

  // Add token t to the sums and to the inverse factor.
  void push(int64_t t) {
    const float* row = tokens->row(t);
    for (int64_t i = 0; i < n.rank; i++) {
      const Vec z(row[i]);
      float* s = sums->row(i);
      for (int64_t j = 0; j < n.columns(); j += Vec::size())
        at::vec::fmadd(z, Vec::loadu(row + j), Vec::loadu(s + j)).store(s + j);
    }
    const float m2 = squared_norm(t), old = unit_of(norm);
    norm = m2 > norm || std::isnan(m2) ? m2 : norm;
    if (unit_of(norm) != old) return refactor();
    const Vec unit(std::sqrt(old));
    float* z = line(0);
    for (int64_t j = 0; j < n.rank; j += Vec::size()) (Vec::loadu(row + j) / unit).store(z + j);
    rank_one(lower, z, line(1), line(2));
  }

  // out = G̃⁻¹ d
  void solve(float* out, const float* d, float unit) const {
    const Vec u(unit);
    float *right = line(1), *half = line(2);
    for (int64_t j = 0; j < n.rank; j += Vec::size()) (Vec::loadu(d + j) / u).store(right + j);
    row_products(half, lower, right);
    sum_rows(out, lower, half);
  }

  void solve_all(const Mat& xs, int64_t t) const {
    const float unit = unit_of(norm);
    solve(x(xs, 0, t), q->row(t), unit);
    float* right = line(0);
    const Vec gamma(settings.gamma);
    for (int64_t i = 1; i <= n.power; i++) {
      row_products(right, sums->col_range(n.rank, n.rank), x(xs, i - 1, t));
      each([gamma](Vec v) { return gamma * v; }, vector(right));
      solve(x(xs, i, t), right, unit);
    }
    mix(mixed->row_range(t, 1), vector(x(xs, 0, t)), vector(x(xs, n.power, t)));
  }

  // The gradients b_i of token t; returns that of its unit m².
  double solve_back(KoopmanSlot& slot, int64_t t) {
    const float unit = unit_of(norm);
    float *dmixed = line(3), *dx = line(4);
    row_products(dmixed, sums->col_range(2 * n.rank, n.width), dy->row(t));
    slot.dmix += halflife::dot(dmixed, x(slot.xs, n.power, t), n.rank) - halflife::dot(dmixed, x(slot.xs, 0, t), n.rank);
    const Vec mu(settings.mix), rest(1.f - settings.mix), gamma(settings.gamma);
    each([mu](Vec, Vec d) { return mu * d; }, vector(dx), vector(dmixed));
    for (int64_t i = n.power; i > 0; i--) {
      solve(x(slot.bs, i, t), dx, unit);
      sum_rows(dx, sums->col_range(n.rank, n.rank), x(slot.bs, i, t));
      slot.dgamma += halflife::dot(dx, x(slot.xs, i - 1, t), n.rank);
      each([gamma](Vec d) { return gamma * d; }, vector(dx));
    }
    each([rest](Vec d, Vec m) { return at::vec::fmadd(rest, m, d); }, vector(dx), vector(dmixed));
    solve(x(slot.bs, 0, t), dx, unit);
    std::copy_n(x(slot.bs, 0, t), n.rank, dq->row(t));
    const float m2 = settings.whole_sequence ? settings.largest : norm;
    return is_unit(m2) ? settings.ridge * trace(slot, t) : 0;
  }

  // The trace of dG̃ = −Σ b_i x_iᵀ of token t.
  double trace(const KoopmanSlot& slot, int64_t t) const {
    double total = 0;
    for (int64_t i = 0; i <= n.power; i++) total -= halflife::dot(x(slot.bs, i, t), x(slot.xs, i, t), n.rank);
    return total;
  }

  // slot.sums += the gradient of the sums that token t reads.
  void add_operator(KoopmanSlot& slot, int64_t t) const {
    float* mixed = line(5);
    mix(vector(mixed), vector(x(slot.xs, 0, t)), vector(x(slot.xs, n.power, t)));
    for (int64_t j = 0; j < n.rank; j++) {
      float* row = slot.sums->row(j);
      for (int64_t i = 0; i <= n.power; i++) {
        const float b = x(slot.bs, i, t)[j];
        add_row(row, -b, x(slot.xs, i, t), n.rank);
        if (i > 0) add_row(row + n.rank, settings.gamma * b, x(slot.xs, i - 1, t), n.rank);
      }
      add_row(row + 2 * n.rank, mixed[j], dy->row(t), n.width);
    }
  }
  static void add_row(float* out, float weight, const float* in, int64_t count) {
    const Vec w(weight);
    for (int64_t j = 0; j < count; j += Vec::size())
      at::vec::fmadd(w, Vec::loadu(in + j), Vec::loadu(out + j)).store(out + j);
  }

  Buffer sums, lower, upper, scratch;
  std::vector<float> entering;
  Buffer forward_xs;
  float norm = 0;
};

}  // namespace

std::unique_ptr<KoopmanBlock> make_koopman_block(const KoopmanSizes& sizes, bool tokens, bool grads) {
  if (tokens) return std::make_unique<TokenOperators>(sizes, grads);
  return std::make_unique<SharedOperator>(sizes, grads);
}

}  // namespace halflife
