// The delta rule (halflife/ops/delta_rule.py). The written values U solve a triangular system:
//
//   (I + L) U = β ⊙ (V − (e^b ⊙ K) S),      L_ij = β_i (k_i · k_j) e^{b_i − b_j},  j < i
//   U = X − Y S,      o = scores(q, k) U + (e^b q) S,      S ← e^{b_C} S + (e^{b_C − b} k)ᵀ U
#include "chunk.h"

namespace halflife {
namespace {

constexpr Precision kSolve = Precision::float32;  // of all that the inverse is multiplied with

class DeltaChunk final : public Chunk {
 public:
  DeltaChunk(Precision precision, DecayKind kind, Sizes n)
      : Chunk(precision, kind, n), overlap(n.chunk, n.chunk), inverse(n.chunk, n.chunk), x(n.chunk, n.values),
        y(n.chunk, wide), written(n.chunk, n.values), keys(n.chunk, wide), system(n.chunk, n.chunk) {
    beta.resize(n.chunk);
  }

  void make_grads(Sizes n) override {
    Chunk::make_grads(n);
    dbeta.resize(n.chunk);
    dwritten = Buffer(n.chunk, n.values);
    r = Buffer(n.chunk, n.values);
    drow = Buffer(n.chunk, n.keys);
  }

  void prepare() override {
    decay->prepare();
    decay->scores(overlap, k, k);
    lower(overlap, true);
    scale_rows(system, overlap, beta.data());
    unit_lower_inverse(inverse, system);
    scale_rows(written, v, beta.data());
    lower_times(kSolve, x, inverse, written, false);
    decay->weight_queries(weighted, k);
    scale_rows(weighted, weighted, beta.data());
    lower_times(kSolve, y, inverse, weighted, false);
    decay->weight_keys(keys, k);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    const Mat s = state.col_range(first, count), u = written->col_range(first, count);
    copy(entering->col_range(first, count), s);
    product_nn(p, u, y, s);
    each([](Vec ys, Vec xs) { return xs - ys; }, u, x->col_range(first, count));
    product_tn(p, update->col_range(first, count), keys, u);
    decay->carry(s, update->col_range(first, count));
  }
  void finish() override {
    decay->weight_queries(weighted, q);
    product_nn(p, o, weighted, entering);
    decay->scores(scores, q, k);
    lower_times(p, o, scores, written, true);
  }

  void prepare_back() override {
    decay->scores(scores, q, k);
    lower_t_times(p, dwritten, scores, dov, false);
    decay->weight_queries(weighted, q);
    product_tn(p, back, weighted, dov);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    const Mat ds = dstate.col_range(first, count), du = dwritten->col_range(first, count);
    const Mat change = update->col_range(first, count), added = back->col_range(first, count);
    copy(leaving->col_range(first, count), ds);
    product_nn(p, du, keys, ds, true);
    product_tn(p, change, y, du);
    each([](Vec a, Vec c) { return a - c; }, added, change);
    decay->carry_back(ds, added);
  }
  void finish_back() override {
    decay->begin_log_grad();
    fill(dq, 0.f);
    fill(dk, 0.f);
    fill(drow, 0.f);
    // o = scores(q, k) U + (e^b q) S
    lower_of_nt(p, dscores, dov, written);
    split_diagonal(dscores, diagonal.data());
    decay->scores_grad(dscores, q, k, scores, dq, dk);
    product_nt(p, dwide, dov, entering);
    decay->weight_queries_grad(dwide);
    decay->add_states(dq, dwide);
    decay->add_read(q, dwide);
    decay->add_query(q, dq);
    // (I + L) U = β (V − (e^b k) S): its adjoint r gives all other gradients
    lower_t_times(kSolve, r, inverse, dwritten, false);
    product_nt(p, dwide, r, entering);
    decay->weight_queries_grad(dwide);
    each([](Vec d) { return d.neg(); }, Mat(dwide));
    lower_of_nt(p, dscores, r, written);
    each([](Vec d) { return d.neg(); }, Mat(dscores));
    lower(dscores, true);
    decay->add_states(drow, dwide);
    for (int64_t i = 0; i < r->rows; i++)
      dbeta[i] = dot(r->row(i), v->row(i), v->cols) + dot(drow->row(i), k->row(i), k->cols) +
                 dot(dscores->row(i), overlap->row(i), overlap->cols);
    scale_rows(drow, drow, beta.data());
    scale_rows(dwide, dwide, beta.data());
    decay->add_read(k, dwide);
    scale_rows(dscores, dscores, beta.data());
    decay->scores_grad(dscores, k, k, overlap, drow, dk);
    decay->add_query(k, drow);
    decay->add_key(k, dk);
    // the outgoing state
    product_nt(p, dwide, written, leaving);
    decay->weight_keys_grad(dwide);
    decay->add_write(k, dwide);
    decay->add_states(dk, dwide);
    add_diagonal(dq, dk, q, k, diagonal.data());
    add(dk, drow);
    scale_rows(dv, r, beta.data());
    decay->log_grad(entering, leaving, dg);
  }

  Buffer overlap, inverse, x, y, written, keys, system;
  Buffer dwritten, r, drow;
};

}  // namespace

std::unique_ptr<Chunk> make_delta(Precision precision, DecayKind kind, Sizes sizes) {
  return std::make_unique<DeltaChunk>(precision, kind, sizes);
}

}  // namespace halflife
