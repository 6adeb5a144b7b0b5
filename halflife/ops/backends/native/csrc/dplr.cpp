// DPLR (halflife/ops/dplr.py). The corrections U (rows u_t = S_{t−1}ᵀ a_t) solve a triangular system:
//
//   (I − L_b) U = L_k V + (e^{c_{i−1}} ⊙ A) S,      L_y[i, j] = Σ_K a_i y_j e^{c_{i−1} − c_j},  j < i
//   U = X + Y S,      o = scores(q, k) V + scores(q, b) U + (e^c q) S
//
// `above` holds the vector a of each token in the row of the token before it.
#include "chunk.h"

namespace halflife {
namespace {

constexpr Precision kSolve = Precision::float32;  // of all that the inverse is multiplied with

class DPLRChunk final : public Chunk {
 public:
  DPLRChunk(Precision precision, DecayKind kind, Sizes n)
      : Chunk(precision, kind, n), above(n.chunk, n.keys), inverse(n.chunk, n.chunk), from_keys(n.chunk, n.chunk),
        x(n.chunk, n.values), y(n.chunk, n.keys), corrected(n.chunk, n.values), keys(n.chunk, n.keys),
        scores_b(n.chunk, n.chunk), scratch(n.chunk, n.values) {
    a = Buffer(n.chunk, n.keys);
    b = Buffer(n.chunk, n.keys);
  }

  void make_grads(Sizes n) override {
    Chunk::make_grads(n);
    for (auto* m : {&da, &db, &dread}) *m = Buffer(n.chunk, n.keys);
    for (auto* m : {&dcorrected, &r}) *m = Buffer(n.chunk, n.values);
    for (auto& d : diagonals) d.resize(n.chunk);
  }

  void prepare() override {
    decay->prepare();
    earlier(above, a);
    decay->scores(scores_b, above, b);
    each([](Vec s) { return s.neg(); }, Mat(scores_b));
    later(scores_b, scores_b);
    unit_lower_inverse(inverse, scores_b);
    decay->scores(from_keys, above, k);
    later(from_keys, from_keys);
    lower_times(p, scratch, from_keys, v, false);
    lower_times(kSolve, x, inverse, scratch, false);
    // e^{c_{i−1}} a_i: the first token of the chunk reads the entering state without decay
    decay->weight_queries(weighted, above);
    later(weighted, weighted);
    copy(weighted->row_range(0, 1), a->row_range(0, 1));
    lower_times(kSolve, y, inverse, weighted, false);
    decay->weight_keys(keys, b);
    decay->weight_keys(weighted, k);
    product_tn(p, update, weighted, v);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    const Mat s = state.col_range(first, count), u = corrected->col_range(first, count);
    copy(entering->col_range(first, count), s);
    product_nn(p, u, y, s);
    add(u, x->col_range(first, count));
    product_tn(p, update->col_range(first, count), keys, u, true);
    decay->carry(s, update->col_range(first, count));
  }
  void finish() override {
    decay->weight_queries(weighted, q);
    product_nn(p, o, weighted, entering);
    decay->scores(scores, q, k);
    lower_times(p, o, scores, v, true);
    decay->scores(scores, q, b);
    lower_times(p, o, scores, corrected, true);
  }

  void prepare_back() override {
    decay->scores(scores, q, k);
    decay->scores(scores_b, q, b);
    lower_t_times(p, dcorrected, scores_b, dov, false);
    decay->weight_queries(weighted, q);
    product_tn(p, back, weighted, dov);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    const Mat ds = dstate.col_range(first, count), du = dcorrected->col_range(first, count);
    copy(leaving->col_range(first, count), ds);
    product_nn(p, du, keys, ds, true);
    product_tn(p, back->col_range(first, count), y, du, true);
    decay->carry_back(ds, back->col_range(first, count));
  }
  void finish_back() override {
    decay->begin_log_grad();
    for (auto* m : {&dq, &dk, &db}) fill(*m, 0.f);
    lower_t_times(kSolve, r, inverse, dcorrected, false);  // the adjoint of the system's right-hand side
    // o = scores(q, k) V + scores(q, b) U + (e^c q) S
    lower_of_nt(p, dscores, dov, v);
    split_diagonal(dscores, diagonals[0].data());
    decay->scores_grad(dscores, q, k, scores, dq, dk);
    lower_of_nt(p, dscores, dov, corrected);
    split_diagonal(dscores, diagonals[1].data());
    decay->scores_grad(dscores, q, b, scores_b, dq, db);
    product_nt(p, dwide, dov, entering);
    decay->weight_queries_grad(dwide);
    add(dq, dwide);
    decay->add_query(q, dq);
    // (I − L_b) U = L_k V + (e^c a) S, where a stands one row earlier
    product_nt(p, dread, r, entering);
    earlier(da, dread);
    decay->weight_queries_grad(da);
    system_grad(v, k, dk, diagonals[2].data());
    system_grad(corrected, b, db, diagonals[3].data());
    decay->add_query(above, da);
    decay->add_key(k, dk);
    decay->add_key(b, db);
    // outgoing state = e^{c_C} S + (e^{c_C − c} k)ᵀ V + (e^{c_C − c} b)ᵀ U
    write_grad(v, k, dk);
    write_grad(corrected, b, db);
    add_diagonal(dq, dk, q, k, diagonals[0].data());
    add_diagonal(dq, db, q, b, diagonals[1].data());
    add_diagonal(da, dk, above, k, diagonals[2].data());
    add_diagonal(da, db, above, b, diagonals[3].data());
    later(da, da);
    copy(da->row_range(0, 1), dread->row_range(0, 1));
    lower_t_times(p, dv, scores, dov, false);
    decay->weight_keys(weighted, k);
    product_nn(p, dv, weighted, leaving, true);
    lower_t_times(p, dv, from_keys, r, true);
    decay->log_grad(entering, leaving, dg);
  }

 private:
  // From L_y: adds to da and dy all but the diagonal of scores(above, y), which it returns.
  void system_grad(const Mat& values, const Mat& y, const Mat& dy, float* diagonal) {
    lower_of_nt(p, dscores, r, values);
    earlier(dscores, dscores);
    lower(dscores, false);
    split_diagonal(dscores, diagonal);
    decay->scores_grad(dscores, above, y, scores, da, dy);
  }
  void write_grad(const Mat& values, const Mat& y, const Mat& dy) {
    product_nt(p, dwide, values, leaving);
    decay->weight_keys_grad(dwide);
    decay->add_write(y, dwide);
    add(dy, dwide);
  }

  Buffer above, inverse, from_keys, x, y, corrected, keys, scores_b, scratch;
  Buffer dcorrected, r, dread;
  std::vector<float> diagonals[4];
};

}  // namespace

std::unique_ptr<Chunk> make_dplr(Precision precision, DecayKind kind, Sizes sizes) {
  return std::make_unique<DPLRChunk>(precision, kind, sizes);
}

}  // namespace halflife
