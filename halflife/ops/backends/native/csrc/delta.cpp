// The delta rule (halflife/ops/delta_rule.py). The written values U solve a triangular system:
//
//   (I + L) U = β ⊙ (V − (e^b ⊙ K) S),      L_ij = β_i (k_i · k_j) e^{b_i − b_j},  j < i
//   U = X + Y S,      o = scores(q, k) U + (e^b q) S,      S ← e^{b_C} S + (e^{b_C − b} k)ᵀ U
#include "chunk.h"

namespace halflife {
namespace {

class DeltaChunk final : public Chunk {
 public:
  DeltaChunk(Precision tokens, DecayKind kind, Sizes n)
      : Chunk(tokens, kind, n), overlap(n.chunk, n.chunk), inverse(n.chunk, n.chunk), written(n.chunk, n.values),
        y(n.chunk, wide), keys(n.chunk, wide), minus_beta(n.chunk) {
    beta.resize(n.chunk);
  }

  void make_grads() override {
    Chunk::make_grads();
    scores = Buffer(sizes.chunk, sizes.chunk);
    dwritten = Buffer(sizes.chunk, sizes.values);
  }

  void prepare() override {
    Work& w = work();
    decay->prepare();
    decay->scores(overlap, k, k);
    lower(overlap, true);
    scale_rows(w.dscores, overlap, beta.data());
    unit_lower_inverse(inverse, w.dscores);
    scale_rows(w.o, v, beta.data());
    lower_times(kSingle, written, inverse, w.o, false);  // X, to which the walk adds Y S
    decay->weight_queries(w.weighted, k);
    for (size_t i = 0; i < beta.size(); i++) minus_beta[i] = -beta[i];
    scale_rows(w.weighted, w.weighted, minus_beta.data());
    lower_times(kSingle, y, inverse, w.weighted, false);
    decay->weight_keys(keys, k);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    const Mat s = state.col_range(first, count), u = written->col_range(first, count);
    copy(entering->col_range(first, count), s);
    product_nn(kSingle, u, y, s, true);
    product_tn(kSingle, update->col_range(first, count), keys, u);
    decay->carry(s, update->col_range(first, count));
  }
  void finish() override {
    Work& w = work();
    decay->weight_queries(w.weighted, q);
    product_nn(kSingle, w.o, w.weighted, entering);
    decay->scores(w.scores, q, k);
    lower_times(kSingle, w.o, w.scores, written, true);
  }

  void prepare_back() override {
    Work& w = work();
    decay->scores(scores, q, k);
    lower_t_times(kSingle, dwritten, scores, dout, false);
    decay->weight_queries(w.weighted, q);
    product_tn(kSingle, update, w.weighted, dout);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    const Mat ds = dstate.col_range(first, count), du = dwritten->col_range(first, count);
    copy(leaving->col_range(first, count), ds);
    product_nn(kSingle, du, keys, ds, true);
    product_tn(kSingle, update->col_range(first, count), y, du, true);
    decay->carry_back(ds, update->col_range(first, count));
  }
  void finish_back() override {
    Work& w = work();
    decay->begin_log_grad();
    fill(w.dq, 0.f);
    fill(w.dk, 0.f);
    // o = scores(q, k) U + (e^b q) S
    lower_of_nt(kSingle, w.dscores, dout, written);
    split_diagonal(w.dscores, w.diagonal.data());
    decay->scores_grad(w.dscores, q, k, scores, w.dq, w.dk);
    product_nt(kSingle, w.dwide, dout, entering);
    decay->weight_queries_grad(w.dwide);
    decay->add_states(w.dq, w.dwide);
    decay->add_read(q, w.dwide);
    decay->add_query(q, w.dq);
    // (I + L) U = β (V − (e^b k) S): its adjoint r gives all other gradients
    const Mat r = w.dv, drow = w.weighted->col_range(0, sizes.keys);
    lower_t_times(kSingle, r, inverse, dwritten, false);
    product_nt(kSingle, w.dwide, r, entering);
    decay->weight_queries_grad(w.dwide);
    each([](Vec d) { return d.neg(); }, Mat(w.dwide));
    lower_of_nt(kSingle, w.dscores, r, written);
    each([](Vec d) { return d.neg(); }, Mat(w.dscores));
    lower(w.dscores, true);
    fill(drow, 0.f);
    decay->add_states(drow, w.dwide);
    for (int64_t i = 0; i < r.rows; i++)
      w.dbeta[i] = dot(r.row(i), v->row(i), v->cols) + dot(drow.row(i), k->row(i), k->cols) +
                   dot(w.dscores->row(i), overlap->row(i), overlap->cols);
    scale_rows(drow, drow, beta.data());
    scale_rows(w.dwide, w.dwide, beta.data());
    decay->add_read(k, w.dwide, minus_beta.data());
    scale_rows(w.dscores, w.dscores, beta.data());
    decay->scores_grad(w.dscores, k, k, overlap, drow, w.dk);
    decay->add_query(k, drow);
    decay->add_key(k, w.dk);
    add_diagonal(w.dq, w.dk, q, k, w.diagonal);
    scale_rows(r, r, beta.data());  // the gradient of v
    // the outgoing state
    product_nt(kSingle, w.dwide, written, leaving);
    decay->weight_keys_grad(w.dwide);
    decay->add_write(k, w.dwide);
    decay->add_states(w.dk, w.dwide);
    add(w.dk, drow);
    decay->log_grad(entering, leaving, w.dg);
  }

  Buffer overlap, inverse, written, y, keys;
  Buffer scores, dwritten;
  std::vector<float> minus_beta;
};

}  // namespace

std::unique_ptr<Chunk> make_delta(Precision tokens, DecayKind kind, Sizes sizes) {
  return std::make_unique<DeltaChunk>(tokens, kind, sizes);
}

}  // namespace halflife
