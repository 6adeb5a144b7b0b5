// The decay of a cascade of N states (halflife/ops/cascade): rows [nK, (n + 1)K) of a state tensor are state n.
//
// A token changes the states by M = I + D, where D has entries on the diagonal and below it. With X_i[j] = M_i ⋯ M_{j+1}
// e_1, the content of the key of token j in the N states after token i, and P_i = M_i ⋯ M_1:
//
//   pairs[i][j] = 1ᵀ X_i[j],   reads[i] = 1ᵀ P_i,   keys[j] = X_C[j],   S ← P_C S + update
//
// Both follow X_i = M_i X_{i−1}, in which keys are columns and the states before the chunk are the first columns.
#include "decay.h"

namespace halflife {
namespace {

class CascadeDecay final : public Decay {
 public:
  CascadeDecay(Precision p, int64_t chunk, int64_t keys, int64_t states)
      : Decay(p, chunk, keys), states_(states), x_((chunk + 1) * states, kLane + chunk), adjoint_(states, kLane + chunk),
        pairs_(chunk, chunk), dpairs_(chunk, chunk), raw_scores_(chunk, chunk), raw_(chunk, keys * states),
        reads_(states, chunk), dreads_(states, chunk), dkeys_(states, chunk), carried_(states) {
    g_ = Buffer(chunk, kLane);
    for (int64_t n = 0; n < states_; n++) x(-1, n)[n] = 1.f;
  }

  int64_t states() const override { return states_; }

  void prepare() override {
    std::vector<double> diagonal(states_, 1.);
    for (int64_t i = 0; i < chunk_; i++) {
      const int64_t width = columns(i);
      std::fill_n(pairs_->row(i), width - kLane, 0.f);
      for (int64_t n = 0; n < states_; n++) {
        const Vec kept(1.f + change(i, n)), moved(n ? below(i, n) : 0.f);
        const float *before = x(i - 1, n), *earlier = n ? x(i - 1, n - 1) : before;
        float* now = x(i, n);
        for (int64_t j = 0; j < width; j += Vec::size())
          at::vec::fmadd(kept, Vec::loadu(before + j), moved * Vec::loadu(earlier + j)).store(now + j);
        if (n == 0) now[kLane + i] = 1.f;
        for (int64_t j = 0; j < width - kLane; j += Vec::size())
          (Vec::loadu(pairs_->row(i) + j) + Vec::loadu(now + kLane + j)).store(pairs_->row(i) + j);
        diagonal[n] *= 1. + change(i, n);
      }
      for (int64_t m = 0; m < states_; m++) {
        reads_->row(m)[i] = 0.f;
        for (int64_t n = m; n < states_; n++) reads_->row(m)[i] += x(i, n)[m];
      }
    }
    for (int64_t n = 0; n < states_; n++) {
      const bool slow = diagonal[n] > 0.5;
      carried_[n].kept = slow ? 1.f : 0.f;
      carried_[n].change = static_cast<float>(slow ? diagonal[n] - 1. : diagonal[n]);
    }
  }

  void scores(const Mat& out, const Mat& a, const Mat& b) override {
    lower_of_nt(precision_, out, a, b);
    each([](Vec s, Vec m) { return s * m; }, out, Mat(pairs_));
  }
  void weight_queries(const Mat& out, const Mat& q) override {
    for (int64_t n = 0; n < states_; n++) scale_rows(cols(out, n), q, reads_->row(n));
  }
  void weight_keys(const Mat& out, const Mat& k) override {
    for (int64_t n = 0; n < states_; n++) scale_rows(cols(out, n), k, x(chunk_ - 1, n) + kLane);
  }
  void carry(const Mat& state, const Mat& update) override {
    for (int64_t n = states_ - 1; n >= 0; n--) {
      const Vec kept(carried_[n].kept), change(carried_[n].change);
      each([=](Vec s, Vec u) { return decay_and_add(s, kept, change, u); }, rows(state, n), rows(update, n));
      for (int64_t m = 0; m < n; m++) add_times(rows(state, n), rows(state, m), x(chunk_ - 1, n)[m]);
    }
  }
  void carry_back(const Mat& grad, const Mat& update) override {
    for (int64_t m = 0; m < states_; m++) {
      const Vec kept(carried_[m].kept), change(carried_[m].change);
      each([=](Vec s, Vec u) { return decay_and_add(s, kept, change, u); }, rows(grad, m), rows(update, m));
      for (int64_t n = m + 1; n < states_; n++) add_times(rows(grad, m), rows(grad, n), x(chunk_ - 1, n)[m]);
    }
  }

  void weight_queries_grad(const Mat& d) override {
    copy(raw_, d);
    for (int64_t n = 0; n < states_; n++) scale_rows(cols(d, n), cols(d, n), reads_->row(n));
  }
  void weight_keys_grad(const Mat& d) override {
    copy(raw_, d);
    for (int64_t n = 0; n < states_; n++) scale_rows(cols(d, n), cols(d, n), x(chunk_ - 1, n) + kLane);
  }
  void add_states(const Mat& out, const Mat& d) override {
    for (int64_t n = 0; n < states_; n++) add(out, cols(d, n));
  }
  void scores_grad(const Mat& grad, const Mat& a, const Mat& b, const Mat&, const Mat& da, const Mat& db) override {
    lower_of_nt(precision_, raw_scores_, a, b);
    each([](Vec o, Vec g, Vec s) { return at::vec::fmadd(g, s, o); }, Mat(dpairs_), grad, Mat(raw_scores_));
    each([](Vec g, Vec m) { return g * m; }, grad, Mat(pairs_));
    lower_times(precision_, da, grad, b, true);
    lower_t_times(precision_, db, grad, a, true);
  }

  void begin_log_grad() override {
    for (auto* d : {&dpairs_, &dreads_, &dkeys_}) fill(*d, 0.f);
  }
  void add_query(const Mat&, const Mat&) override {}  // `scores_grad` adds both
  void add_key(const Mat&, const Mat&) override {}
  void add_read(const Mat& a, const Mat&, const float* factors) override {
    for (int64_t n = 0; n < states_; n++)
      for (int64_t i = 0; i < chunk_; i++)
        dreads_->row(n)[i] += (factors ? factors[i] : 1.f) * dot(a.row(i), raw_->row(i) + n * keys_, keys_);
  }
  void add_write(const Mat& k, const Mat&) override {
    for (int64_t n = 0; n < states_; n++)
      for (int64_t i = 0; i < chunk_; i++) dkeys_->row(n)[i] += dot(k.row(i), raw_->row(i) + n * keys_, keys_);
  }

  // The gradient of the entries of D: backward through X_i = M_i X_{i−1}.
  void log_grad(const Mat& entering, const Mat& leaving, const Mat& out) override {
    fill(out, 0.f);
    fill(adjoint_, 0.f);
    for (int64_t n = 0; n < states_; n++) {
      for (int64_t m = 0; m <= n; m++) {
        const Mat s = rows(entering, m), d = rows(leaving, n);
        for (int64_t i = 0; i < keys_; i++) adjoint_->row(n)[m] += dot(s.row(i), d.row(i), s.cols);
      }
      std::copy_n(dkeys_->row(n), chunk_, adjoint_->row(n) + kLane);
    }
    for (int64_t i = chunk_ - 1; i >= 0; i--) {
      const int64_t width = columns(i);
      for (int64_t n = 0; n < states_; n++) {
        float* a = adjoint_->row(n);
        for (int64_t m = 0; m < states_; m++) a[m] += dreads_->row(m)[i];
        for (int64_t j = 0; j < width - kLane; j += Vec::size())
          (Vec::loadu(a + kLane + j) + Vec::loadu(dpairs_->row(i) + j)).store(a + kLane + j);
        out.row(i)[n] = dot(a, x(i - 1, n), width);
        if (n) out.row(i)[states_ + n - 1] = dot(a, x(i - 1, n - 1), width);
      }
      for (int64_t n = 0; n < states_; n++) {
        const bool last = n + 1 == states_;
        const Vec kept(1.f + change(i, n)), moved(last ? 0.f : below(i, n + 1));
        float *a = adjoint_->row(n), *later = last ? a : adjoint_->row(n + 1);
        for (int64_t j = 0; j < width; j += Vec::size())
          at::vec::fmadd(kept, Vec::loadu(a + j), moved * Vec::loadu(later + j)).store(a + j);
      }
    }
  }

 private:
  // Row n of X after token i (−1: before the chunk). Its columns are the states, then the keys; later keys are 0.
  float* x(int64_t i, int64_t n) const { return x_->row((i + 1) * states_ + n); }
  int64_t columns(int64_t i) const { return kLane + round_up(i + 1); }
  // The entry n, n of D, and the entry n, n − 1.
  float change(int64_t i, int64_t n) const { return g_->row(i)[n]; }
  float below(int64_t i, int64_t n) const { return g_->row(i)[states_ + n - 1]; }
  Mat cols(const Mat& m, int64_t n) const { return m.col_range(n * keys_, keys_); }
  Mat rows(const Mat& m, int64_t n) const { return m.row_range(n * keys_, keys_); }
  static void add_times(const Mat& out, const Mat& in, float factor) {
    if (factor == 0.f) return;
    const Vec weight(factor);
    each([=](Vec o, Vec a) { return at::vec::fmadd(a, weight, o); }, out, in);
  }

  int64_t states_;
  Buffer x_, adjoint_;
  Buffer pairs_, dpairs_, raw_scores_;
  Buffer raw_;                       // a gradient before it gets its weights
  Buffer reads_, dreads_, dkeys_;    // [N, C]
  std::vector<Split> carried_;       // the diagonal of P_C
};

}  // namespace

std::unique_ptr<Decay> make_cascade(Precision precision, int64_t chunk, int64_t keys, int64_t states) {
  return std::make_unique<CascadeDecay>(precision, chunk, keys, states);
}

}  // namespace halflife
