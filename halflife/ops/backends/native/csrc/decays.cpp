#include "decay.h"

#include <cmath>

namespace halflife {
namespace {

constexpr float kFloor = -110.f;  // exp(−110) is 0 in float32; differences of clamped log-decays are finite

// A running sum in float64, held in two floats, so that differences of two entries lose no digits.
struct Cumulative {
  std::vector<float> high, low;
  explicit Cumulative(int64_t n) : high(n), low(n) {}
  void set(int64_t i, double x) {
    high[i] = static_cast<float>(x);
    low[i] = static_cast<float>(x - high[i]);
  }
  // this[i] − other[j …], a vector.
  Vec minus(int64_t i, const Cumulative& other, int64_t j) const {
    return (Vec(high[i]) - Vec::loadu(&other.high[j])) + (Vec(low[i]) - Vec::loadu(&other.low[j]));
  }
};

// Σ_{i ≥ t} x_i in place.
void sum_from(float* x, int64_t n) {
  for (int64_t t = n - 2; t >= 0; t--) x[t] += x[t + 1];
}

// The gradient of the log-decays of a chunk: reads summed from t on, writes summed before t, and what is carried.
void log_grad_column(float* reads, const float* writes, float carried, int64_t n, float* out, int64_t stride) {
  sum_from(reads, n);
  float before = 0.f;
  for (int64_t t = 0; t < n; t++) {
    out[t * stride] = reads[t] + before + carried;
    before += writes[t];
  }
}

// ------------------------------------------------------------------------------------------------- scalar

class ScalarDecay final : public Decay {
 public:
  ScalarDecay(DecayKind kind, Precision tokens, int64_t chunk, int64_t keys)
      : Decay(tokens, chunk, keys), none_(kind == DecayKind::none), matrix_(chunk, chunk), query_(chunk), key_(chunk),
        reads_(chunk), writes_(chunk), b_(chunk) {
    g_ = Buffer(chunk, kLane);
    if (none_) weights();
  }

  void prepare() override {
    if (!none_) weights();
  }

  void scores(const Mat& out, const Mat& x, const Mat& y) override {
    lower_of_nt(tokens_, out, x, y);
    mask(out);
  }
  void weight_queries(const Mat& out, const Mat& x) override { scale_rows(out, x, query_.data()); }
  void weight_keys(const Mat& out, const Mat& k) override { scale_rows(out, k, key_.data()); }
  void carry(const Mat& state, const Mat& update) override {
    const Vec kept(carried_.kept), change(carried_.change);
    each([=](Vec s, Vec u) { return decay_and_add(s, kept, change, u); }, state, update);
  }

  void scores_grad(const Mat& grad, const Mat& x, const Mat& y, const Mat&, const Mat& dx, const Mat& dy) override {
    mask(grad);
    lower_times(kSingle, dx, grad, y, true);
    lower_t_times(kSingle, dy, grad, x, true);
  }

  void begin_log_grad() override {
    std::fill(reads_.begin(), reads_.end(), 0.f);
    std::fill(writes_.begin(), writes_.end(), 0.f);
  }
  void add_query(const Mat& x, const Mat& dx) override { products(reads_, x, dx, 1.f); }
  void add_key(const Mat& y, const Mat& dy) override { products(reads_, y, dy, -1.f); }
  void add_write(const Mat& k, const Mat& dk) override { products(writes_, k, dk, 1.f); }
  void log_grad(const Mat& entering, const Mat& leaving, const Mat& out) override {
    if (none_) return;
    float carried = 0.f;
    for (int64_t i = 0; i < entering.rows; i++) carried += dot(entering.row(i), leaving.row(i), entering.cols);
    log_grad_column(reads_.data(), writes_.data(), carried * query_[chunk_ - 1], chunk_, out.data, out.ld);
  }

 private:
  void weights() {
    double b = 0;
    for (int64_t t = 0; t < chunk_; t++) b_.set(t, b += std::max(g_->row(t)[0], kFloor));
    carried_ = Split(static_cast<float>(b));
    for (int64_t t = 0; t < chunk_; t++) {
      query_[t] = b_.high[t] + b_.low[t];
      key_[t] = (b_.high[chunk_ - 1] - b_.high[t]) + (b_.low[chunk_ - 1] - b_.low[t]);
    }
    for (auto* w : {&query_, &key_})
      for (int64_t t = 0; t < chunk_; t += Vec::size())
        exp_nonpositive(at::vec::minimum(Vec::loadu(&(*w)[t]), Vec(0.f))).store(&(*w)[t]);
    for (int64_t i = 0; i < chunk_; i++) {
      float* row = matrix_->row(i);
      for (int64_t j = 0; j <= i; j += Vec::size())
        exp_nonpositive(at::vec::minimum(b_.minus(i, b_, j), Vec(0.f))).store(row + j);
      std::fill(row + i + 1, row + chunk_, 0.f);
    }
  }
  void mask(const Mat& m) const {
    for (int64_t i = 0; i < chunk_; i++)
      for (int64_t j = 0; j <= i; j += Vec::size())
        (Vec::loadu(m.row(i) + j) * Vec::loadu(matrix_->row(i) + j)).store(m.row(i) + j);
  }
  void products(std::vector<float>& out, const Mat& x, const Mat& d, float sign) const {
    if (none_) return;
    for (int64_t i = 0; i < chunk_; i++) out[i] += sign * dot(x.row(i), d.row(i), x.cols);
  }

  bool none_;
  Buffer matrix_;                    // e^{b_i − b_j}
  std::vector<float> query_, key_;   // e^{b_i}, e^{b_C − b_i}
  std::vector<float> reads_, writes_;
  Cumulative b_;
  Split carried_;                    // e^{b_C}
};

// ------------------------------------------------------------------------------------------------- vector

// One rate a channel. Between tiles of 16 tokens the weight e^{b_i − b_j} factors at the last token before the tile of
// i; both exponents are ≤ 0. Inside a tile the products run through the recurrence itself, so no exponent is formed.
class VectorDecay final : public Decay {
 public:
  VectorDecay(Precision tokens, int64_t chunk, int64_t keys)
      : Decay(tokens, chunk, keys), tiles_(chunk / kLane), rate_(chunk, keys), since_(chunk, keys), until_(chunk, keys),
        query_(chunk, keys), key_(chunk, keys), tile_(tiles_, keys), log_tile_(tiles_, keys), reads_(chunk, keys), writes_(chunk, keys),
        left_(kLane, keys), right_(chunk, keys), turned_(keys, chunk), plain_(keys, kLane),
        kept_(keys), change_(keys) {
    g_ = Buffer(chunk, keys);
  }

  void prepare() override {
    each([](Vec, Vec g) { return exp_nonpositive(floored(g)); }, Mat(rate_), Mat(g_));
    for (int64_t n = 0; n < tiles_; n++) {
      running(n);
      for (int64_t d = 0; d < keys_; d += Vec::size()) {
        Vec b(0.f);
        for (int64_t i = n * kLane; i < (n + 1) * kLane; i++) b = b + floored(Vec::loadu(g_->row(i) + d));
        b.store(log_tile_->row(n) + d);
        exp_nonpositive(b).store(tile_->row(n) + d);
      }
    }
    for (int64_t d = 0; d < keys_; d += Vec::size()) {
      Vec before(0.f), after(0.f);  // log-decays of the tiles before and after tile n
      for (int64_t n = 0; n < tiles_; n++) {
        weigh(n, d, since_, query_, exp_nonpositive(before));
        before = before + Vec::loadu(log_tile_->row(n) + d);
      }
      const Vec slow = before > Vec(kSlowDecay);
      Vec::blendv(Vec(0.f), Vec(1.f), slow).store(&kept_[d]);
      Vec::blendv(exp_nonpositive(before), before.expm1(), slow).store(&change_[d]);
      for (int64_t n = tiles_ - 1; n >= 0; n--) {
        weigh(n, d, until_, key_, exp_nonpositive(after));
        after = after + Vec::loadu(log_tile_->row(n) + d);
      }
    }
  }

  void scores(const Mat& out, const Mat& x, const Mat& y) override {
    each([](Vec, Vec k, Vec u) { return k * u; }, Mat(right_), y, Mat(until_));
    transpose(turned_, right_);
    fill(out, 0.f);
    for (int64_t n = 0; n < tiles_; n++) {
      const int64_t i = n * kLane;
      if (n > 0) {
        if (n > 1) scale_rows(turned_->col_range(0, i - kLane), turned_->col_range(0, i - kLane), tile_->row(n - 1));
        each([](Vec, Vec q, Vec s) { return q * s; }, Mat(left_), x.row_range(i, kLane), since_->row_range(i, kLane));
        product_nn(kSingle, out.row_range(i, kLane).col_range(0, i), left_, turned_->col_range(0, i));
      }
      transpose(plain_, y.row_range(i, kLane));
      diagonal_tile(out.row_range(i, kLane).col_range(i, kLane), x.row_range(i, kLane), rate_->row_range(i, kLane));
    }
  }
  void weight_queries(const Mat& out, const Mat& x) override {
    each([](Vec, Vec a, Vec w) { return a * w; }, out, x, Mat(query_));
  }
  void weight_keys(const Mat& out, const Mat& k) override {
    each([](Vec, Vec a, Vec w) { return a * w; }, out, k, Mat(key_));
  }
  void carry(const Mat& state, const Mat& update) override {
    for (int64_t d = 0; d < state.rows; d++) {
      const Vec kept(kept_[d]), change(change_[d]);
      each([=](Vec s, Vec u) { return decay_and_add(s, kept, change, u); }, state.row_range(d, 1), update.row_range(d, 1));
    }
  }

  void scores_grad(const Mat& grad, const Mat& x, const Mat& y, const Mat&, const Mat& dx, const Mat& dy) override {
    // Rows: the keys before a tile, decayed to its start, grow from tile to tile.
    each([](Vec, Vec k, Vec u) { return k * u; }, Mat(right_), y, Mat(until_));
    for (int64_t n = 1; n < tiles_; n++) {
      const int64_t i = n * kLane;
      for (int64_t j = 0; j < i - kLane; j++) times(right_->row(j), tile_->row(n - 1));
      product_nn(kSingle, left_, grad.row_range(i, kLane).col_range(0, i), right_->row_range(0, i));
      each([](Vec o, Vec a, Vec s) { return at::vec::fmadd(a, s, o); }, dx.row_range(i, kLane), Mat(left_),
           since_->row_range(i, kLane));
    }
    // Columns: from the last tile to the first.
    fill(right_, 0.f);
    for (int64_t n = tiles_ - 1; n > 0; n--) {
      const int64_t i = n * kLane;
      if (n < tiles_ - 1)
        for (int64_t j = 0; j < i; j++) times(right_->row(j), tile_->row(n));
      each([](Vec, Vec q, Vec s) { return q * s; }, Mat(left_), x.row_range(i, kLane), since_->row_range(i, kLane));
      product_tn(kSingle, right_->row_range(0, i), grad.row_range(i, kLane).col_range(0, i), left_, true);
    }
    each([](Vec o, Vec a, Vec u) { return at::vec::fmadd(a, u, o); }, dy, Mat(right_), Mat(until_));
    for (int64_t i = 0; i < chunk_; i += kLane)
      diagonal_tile_grad(grad.row_range(i, kLane).col_range(i, kLane), x.row_range(i, kLane), y.row_range(i, kLane),
                         rate_->row_range(i, kLane), dx.row_range(i, kLane), dy.row_range(i, kLane));
  }

  void begin_log_grad() override {
    fill(reads_, 0.f);
    fill(writes_, 0.f);
  }
  void add_query(const Mat& x, const Mat& dx) override { products(reads_, x, dx); }
  void add_key(const Mat& y, const Mat& dy) override {
    each([](Vec o, Vec a, Vec b) { return at::vec::fmadd(a.neg(), b, o); }, Mat(reads_), y, dy);
  }
  void add_write(const Mat& k, const Mat& dk) override { products(writes_, k, dk); }
  void log_grad(const Mat& entering, const Mat& leaving, const Mat& out) override {
    std::vector<float> carried(keys_);
    for (int64_t d = 0; d < keys_; d++)
      carried[d] = dot(entering.row(d), leaving.row(d), entering.cols) * query_->row(chunk_ - 1)[d];
    for (int64_t t = chunk_ - 2; t >= 0; t--) add(reads_->row_range(t, 1), reads_->row_range(t + 1, 1));
    for (int64_t d = 0; d < keys_; d += Vec::size()) {
      Vec before = Vec::loadu(&carried[d]);
      for (int64_t t = 0; t < chunk_; t++) {
        (Vec::loadu(reads_->row(t) + d) + before).store(out.row(t) + d);
        before = before + Vec::loadu(writes_->row(t) + d);
      }
    }
  }

 private:
  static Vec floored(Vec g) { return at::vec::clamp(g, Vec(kFloor), Vec(0.f)); }

  void weigh(int64_t tile, int64_t d, const Mat& inside, const Mat& out, Vec outside) const {
    for (int64_t i = tile * kLane; i < (tile + 1) * kLane; i++)
      (Vec::loadu(inside.row(i) + d) * outside).store(out.row(i) + d);
  }

  // Products of the rates of a tile, from its first token to i, and from i + 1 to its last.
  void running(int64_t tile) {
    const int64_t first = tile * kLane, last = first + kLane - 1;
    for (int64_t d = 0; d < keys_; d += Vec::size()) {
      Vec w(1.f);
      for (int64_t i = first; i <= last; i++) {
        w = w * Vec::loadu(rate_->row(i) + d);
        w.store(since_->row(i) + d);
      }
      w = Vec(1.f);
      for (int64_t i = last; i >= first; i--) {
        w.store(until_->row(i) + d);
        w = w * Vec::loadu(rate_->row(i) + d);
      }
    }
  }

  // out_ij = Σ_d x_id y_jd Π_{j < t ≤ i} rate_td for j ≤ i. Lanes are the tokens j; `plain_` holds y with tokens last.
  void diagonal_tile(const Mat& out, const Mat& x, const Mat& rate) const {
#if defined(CPU_CAPABILITY_AVX512)
    __m512 sums[kLane];
    for (auto& s : sums) s = _mm512_setzero_ps();
    for (int64_t d = 0; d < keys_; d += 4) {
      __m512 y[4], p[4];
      for (int64_t u = 0; u < 4; u++) p[u] = y[u] = _mm512_loadu_ps(plain_->row(d + u));
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLane; i++)
#pragma GCC unroll 4
        for (int64_t u = 0; u < 4; u++) {
          const __mmask16 earlier = static_cast<__mmask16>((1u << i) - 1u);
          p[u] = _mm512_mask_mul_ps(y[u], earlier, p[u], _mm512_set1_ps(rate.row(i)[d + u]));
          sums[i] = _mm512_fmadd_ps(p[u], _mm512_set1_ps(x.row(i)[d + u]), sums[i]);
        }
    }
    for (int64_t i = 0; i < kLane; i++)
      _mm512_storeu_ps(out.row(i), _mm512_maskz_mov_ps(static_cast<__mmask16>((2u << i) - 1u), sums[i]));
#else
    for (int64_t h = 0; h < kLane; h += Vec::size()) {
      Vec sums[kLane];
      for (auto& s : sums) s = Vec(0.f);
      alignas(64) float own[kLane * kLane] = {};
      for (int64_t i = 0; i < kLane; i++) own[i * kLane + i] = 1.f;
      for (int64_t d = 0; d < keys_; d++) {
        const Vec y = Vec::loadu(plain_->row(d) + h);
        Vec p(0.f);
        for (int64_t i = h; i < kLane; i++) {
          p = at::vec::fmadd(p, Vec(rate.row(i)[d]), y * Vec::loadu(own + i * kLane + h));
          sums[i] = at::vec::fmadd(p, Vec(x.row(i)[d]), sums[i]);
        }
      }
      for (int64_t i = 0; i < kLane; i++) sums[i].store(out.row(i) + h);
    }
#endif
  }

  // Lanes are channels; all keys (queries) of the tile decay (grow) together, one token at a time.
  void diagonal_tile_grad(const Mat& grad, const Mat& x, const Mat& y, const Mat& rate, const Mat& dx,
                          const Mat& dy) const {
    for (int64_t d = 0; d < keys_; d += Vec::size()) {
      Vec p[kLane];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLane; i++) {
        const Vec r = Vec::loadu(rate.row(i) + d);
        Vec even = Vec::loadu(dx.row(i) + d), odd(0.f);
#pragma GCC unroll 16
        for (int64_t j = 0; j < i; j++) {
          p[j] = p[j] * r;
          Vec& s = j % 2 ? odd : even;
          s = at::vec::fmadd(p[j], Vec(grad.row(i)[j]), s);
        }
        (even + odd).store(dx.row(i) + d);
        p[i] = Vec::loadu(y.row(i) + d);
      }
#pragma GCC unroll 16
      for (int64_t j = kLane - 1; j >= 0; j--) {
        Vec even = Vec::loadu(dy.row(j) + d), odd(0.f);
        if (j + 1 < kLane) {
          const Vec r = Vec::loadu(rate.row(j + 1) + d);
#pragma GCC unroll 16
          for (int64_t i = kLane - 1; i > j; i--) {
            p[i] = p[i] * r;
            Vec& s = i % 2 ? odd : even;
            s = at::vec::fmadd(p[i], Vec(grad.row(i)[j]), s);
          }
        }
        (even + odd).store(dy.row(j) + d);
        p[j] = Vec::loadu(x.row(j) + d);
      }
    }
  }

  void times(float* row, const float* weights) const {
    for (int64_t d = 0; d < keys_; d += Vec::size()) (Vec::loadu(row + d) * Vec::loadu(weights + d)).store(row + d);
  }
  static void products(const Mat& out, const Mat& x, const Mat& d) {
    each([](Vec o, Vec a, Vec b) { return at::vec::fmadd(a, b, o); }, out, x, d);
  }

  int64_t tiles_;
  Buffer rate_, since_, until_;  // e^{g_t}; its products inside a tile, up to and after each token
  Buffer query_, key_;           // e^{b_i}, e^{b_C − b_i}
  Buffer tile_, log_tile_;       // the decay of each tile, and its logarithm
  Buffer reads_, writes_;
  Buffer left_, right_, turned_, plain_;
  std::vector<float> kept_, change_;  // e^{b_C}, split
};

// --------------------------------------------------------------------------------------------------- gate

// GateRank's two states: rows [0, K) are the fast one, rows [K, 2K) the slow one.
class GateDecay final : public Decay {
 public:
  GateDecay(Precision tokens, int64_t chunk, int64_t keys)
      : Decay(tokens, chunk, keys), matrix_(chunk, chunk), log_scores_(chunk, chunk), query_fast_(chunk), query_slow_(chunk),
        key_fast_(chunk), key_slow_(chunk), following_(chunk), segment_(chunk), read_fast_(chunk), read_slow_(chunk),
        write_fast_(chunk), write_slow_(chunk), a_(chunk), b_(chunk), wide_a_(chunk), wide_b_(chunk) {
    g_ = Buffer(chunk, kLane);
  }

  int64_t states() const override { return 2; }

  void prepare() override {
    const int64_t last = chunk_ - 1;
    double a = 0, b = 0, first = -INFINITY;
    int64_t count = 0;
    for (int64_t t = 0; t < chunk_; t++) {
      const float slow = g_->row(t)[0];
      a_.set(t, wide_a_[t] = a += std::max(slow, kFloor));
      b_.set(t, wide_b_[t] = b += std::max(g_->row(t)[1], kFloor));
      if (slow != 0.f) {
        if (count++ == 0) first = b;
      }
      segment_[t] = count;
    }
    double next = -INFINITY;  // B at the first reset after t
    for (int64_t t = last; t >= 0; t--) {
      following_[t] = static_cast<float>(next - wide_b_[t]);
      if (g_->row(t)[0] != 0.f) next = wide_b_[t];
    }
    const bool resets = count > 0;
    for (int64_t t = 0; t < chunk_; t++) {
      query_fast_[t] = std::exp(static_cast<float>(wide_a_[t] + std::max(wide_b_[t], first)));
      query_slow_[t] = std::exp(static_cast<float>(wide_a_[t]));
      const bool fast = segment_[t] == count;  // no reset follows
      const double left = fast ? wide_b_[last] - wide_b_[t] : following_[t];
      const float weight = std::exp(static_cast<float>(wide_a_[last] - wide_a_[t] + left));
      key_fast_[t] = fast ? weight : 0.f;
      key_slow_[t] = fast ? 0.f : weight;
    }
    fast_ = Split(resets ? -INFINITY : static_cast<float>(wide_b_[last]));
    slow_ = Split(static_cast<float>(wide_a_[last]));
    fast_to_slow_ = resets ? std::exp(static_cast<float>(wide_a_[last] + first)) : 0.f;
    for (int64_t i = 0; i < chunk_; i++) {
      float* row = matrix_->row(i);
      for (int64_t j = 0; j <= i; j += Vec::size()) {
        const Vec x = a_.minus(i, a_, j) + at::vec::maximum(b_.minus(i, b_, j), Vec::loadu(&following_[j]));
        exp_nonpositive(at::vec::minimum(x, Vec(0.f))).store(row + j);
      }
      std::fill(row + i + 1, row + chunk_, 0.f);
    }
  }

  void scores(const Mat& out, const Mat& x, const Mat& y) override {
    lower_of_nt(tokens_, out, x, y);
    each([](Vec s, Vec m) { return s * m; }, out, Mat(matrix_));
  }
  void weight_queries(const Mat& out, const Mat& x) override {
    scale_rows(fast_cols(out), x, query_fast_.data());
    scale_rows(slow_cols(out), x, query_slow_.data());
  }
  void weight_keys(const Mat& out, const Mat& k) override {
    scale_rows(fast_cols(out), k, key_fast_.data());
    scale_rows(slow_cols(out), k, key_slow_.data());
  }
  void carry(const Mat& state, const Mat& update) override {
    add_merged(slow_rows(state), slow_, fast_rows(state), slow_rows(update));
    add_alone(fast_rows(state), fast_, fast_rows(update));
  }
  void carry_back(const Mat& grad, const Mat& update) override {
    add_merged(fast_rows(grad), fast_, slow_rows(grad), fast_rows(update));
    add_alone(slow_rows(grad), slow_, slow_rows(update));
  }

  void weight_queries_grad(const Mat& d) override {
    scale_rows(fast_cols(d), fast_cols(d), query_fast_.data());
    scale_rows(slow_cols(d), slow_cols(d), query_slow_.data());
  }
  void weight_keys_grad(const Mat& d) override {
    scale_rows(fast_cols(d), fast_cols(d), key_fast_.data());
    scale_rows(slow_cols(d), slow_cols(d), key_slow_.data());
  }
  void add_states(const Mat& out, const Mat& d) override {
    each([](Vec o, Vec f, Vec s) { return o + (f + s); }, out, fast_cols(d), slow_cols(d));
  }
  void scores_grad(const Mat& grad, const Mat& x, const Mat& y, const Mat& scores, const Mat& dx,
                   const Mat& dy) override {
    each([](Vec o, Vec g, Vec s) { return at::vec::fmadd(g, s, o); }, Mat(log_scores_), grad, scores);
    each([](Vec g, Vec m) { return g * m; }, grad, Mat(matrix_));
    lower_times(kSingle, dx, grad, y, true);
    lower_t_times(kSingle, dy, grad, x, true);
  }

  void begin_log_grad() override {
    fill(log_scores_, 0.f);
    for (auto* x : {&read_fast_, &read_slow_, &write_fast_, &write_slow_}) std::fill(x->begin(), x->end(), 0.f);
  }
  void add_query(const Mat&, const Mat&) override {}  // the log-scores hold both
  void add_key(const Mat&, const Mat&) override {}
  void add_read(const Mat& x, const Mat& d, const float*) override { products(read_fast_, read_slow_, x, d); }
  void add_write(const Mat& k, const Mat& d) override { products(write_fast_, write_slow_, k, d); }

  void log_grad(const Mat& entering, const Mat& leaving, const Mat& out) override {
    auto inner = [](const Mat& x, const Mat& y) {
      float s = 0.f;
      for (int64_t i = 0; i < x.rows; i++) s += dot(x.row(i), y.row(i), x.cols);
      return s;
    };
    const float fast = (fast_.kept + fast_.change) * inner(fast_rows(entering), fast_rows(leaving));
    const float slow = (slow_.kept + slow_.change) * inner(slow_rows(entering), slow_rows(leaving));
    const float merged = fast_to_slow_ * inner(fast_rows(entering), slow_rows(leaving));
    // Sums over pairs of tokens, apart for those with a reset between them: only these see the slow decay.
    std::vector<float> inside(chunk_), rows(chunk_), columns(chunk_), dslow(chunk_), read(read_fast_);
    for (int64_t i = 0; i < chunk_; i++)
      for (int64_t j = 0; j < i; j++) {
        const float x = log_scores_->row(i)[j];
        if (segment_[i] == segment_[j]) {
          inside[i] += x;
          inside[j] -= x;
        } else {
          rows[i] += x;
          columns[j] += x;
        }
      }
    for (int64_t t = 0; t < chunk_; t++) dslow[t] = rows[t] - columns[t] + read_fast_[t] + read_slow_[t];
    sum_from(dslow.data(), chunk_);
    sum_from(inside.data(), chunk_);
    sum_from(read.data(), chunk_);
    float before_fast = 0.f, before_slow = 0.f, open = 0.f;
    for (int64_t t = 0; t < chunk_; t++) {
      const int64_t resets_before = t ? segment_[t - 1] : 0;
      const bool reset = segment_[t] != resets_before;
      // Keys of the segment that ends at t or later decay fast until its reset.
      if (t && resets_before != (t > 1 ? segment_[t - 2] : 0)) open = 0.f;
      if (t) open += columns[t - 1] + write_slow_[t - 1];
      float dfast = inside[t] + before_fast + open;
      if (resets_before == 0) dfast += read[t] + (fast + merged);
      out.row(t)[0] = reset ? dslow[t] + before_slow + (slow + merged) : 0.f;
      out.row(t)[1] = dfast;
      before_fast += write_fast_[t];
      before_slow += write_slow_[t];
    }
  }

 private:
  Mat fast_cols(const Mat& m) const { return m.col_range(0, keys_); }
  Mat slow_cols(const Mat& m) const { return m.col_range(keys_, keys_); }
  Mat fast_rows(const Mat& m) const { return m.row_range(0, keys_); }
  Mat slow_rows(const Mat& m) const { return m.row_range(keys_, keys_); }
  static void add_alone(const Mat& state, const Split& decay, const Mat& update) {
    const Vec kept(decay.kept), change(decay.change);
    each([=](Vec s, Vec u) { return decay_and_add(s, kept, change, u); }, state, update);
  }
  // The other state is added at a reset.
  void add_merged(const Mat& state, const Split& decay, const Mat& other, const Mat& update) const {
    const Vec kept(decay.kept), change(decay.change), merged(fast_to_slow_);
    each([=](Vec s, Vec u, Vec x) { return decay_and_add(s, kept, change, at::vec::fmadd(x, merged, u)); }, state, update,
         other);
  }
  void products(std::vector<float>& fast, std::vector<float>& slow, const Mat& x, const Mat& d) const {
    for (int64_t i = 0; i < chunk_; i++) {
      fast[i] += dot(x.row(i), d.row(i), keys_);
      slow[i] += dot(x.row(i), d.row(i) + keys_, keys_);
    }
  }

  Buffer matrix_, log_scores_;
  std::vector<float> query_fast_, query_slow_, key_fast_, key_slow_;
  std::vector<float> following_;  // B at the first reset after each token, less B there; −∞ without one
  std::vector<int64_t> segment_;  // resets up to and with each token
  std::vector<float> read_fast_, read_slow_, write_fast_, write_slow_;
  Cumulative a_, b_;
  std::vector<double> wide_a_, wide_b_;
  Split fast_, slow_;
  float fast_to_slow_ = 0;
};

}  // namespace

std::unique_ptr<Decay> make_decay(DecayKind kind, Precision tokens, int64_t chunk, int64_t keys) {
  if (kind == DecayKind::vector) return std::make_unique<VectorDecay>(tokens, chunk, keys);
  if (kind == DecayKind::gate) return std::make_unique<GateDecay>(tokens, chunk, keys);
  return std::make_unique<ScalarDecay>(kind, tokens, chunk, keys);
}

}  // namespace halflife
