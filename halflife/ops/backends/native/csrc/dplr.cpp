// DPLR (halflife/ops/dplr.py). The corrections U (rows u_t = S_{t−1}ᵀ a_t) solve a triangular system:
//
//   (I − L_b) U = L_k V + (e^{c_{i−1}} ⊙ A) S,      L_y[i, j] = Σ_K a_i y_j e^{c_{i−1} − c_j},  j < i
//   U = X + Y S,      o = scores(q, k) V + scores(q, b) U + (e^c q) S
//
// `above` holds the vector a of each token in the row of the token before it.
#include "chunk.h"

namespace halflife {
namespace {

class DPLRChunk final : public Chunk {
 public:
  DPLRChunk(Precision tokens, DecayKind kind, Sizes n)
      : Chunk(tokens, kind, n), above(n.chunk, n.keys), inverse(n.chunk, n.chunk), from_keys(n.chunk, n.chunk),
        corrected(n.chunk, n.values), y(n.chunk, n.keys), keys(n.chunk, n.keys) {
    a = Buffer(n.chunk, n.keys);
    b = Buffer(n.chunk, n.keys);
  }

  void make_grads() override {
    Chunk::make_grads();
    scores_k = Buffer(sizes.chunk, sizes.chunk);
    scores_b = Buffer(sizes.chunk, sizes.chunk);
    dcorrected = Buffer(sizes.chunk, sizes.values);
    for (auto& d : diagonals) d.resize(sizes.chunk);
  }

  void prepare() override {
    Work& w = work();
    decay->prepare();
    earlier(above, a);
    decay->scores(w.scores, above, b);
    each([](Vec s) { return s.neg(); }, Mat(w.scores));
    later(w.scores, w.scores);
    unit_lower_inverse(inverse, w.scores);
    decay->scores(from_keys, above, k);
    later(from_keys, from_keys);
    lower_times(kSingle, w.o, from_keys, v, false);
    lower_times(kSingle, corrected, inverse, w.o, false);  // X, to which the walk adds Y S
    // e^{c_{i−1}} a_i: the first token of the chunk reads the entering state without decay
    decay->weight_queries(w.weighted, above);
    later(w.weighted, w.weighted);
    copy(w.weighted->row_range(0, 1), a->row_range(0, 1));
    lower_times(kSingle, y, inverse, w.weighted, false);
    decay->weight_keys(keys, b);
    decay->weight_keys(w.weighted, k);
    product_tn(kSingle, update, w.weighted, v);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    const Mat s = state.col_range(first, count), u = corrected->col_range(first, count);
    copy(entering->col_range(first, count), s);
    product_nn(kSingle, u, y, s, true);
    product_tn(kSingle, update->col_range(first, count), keys, u, true);
    decay->carry(s, update->col_range(first, count));
  }
  void finish() override {
    Work& w = work();
    decay->weight_queries(w.weighted, q);
    product_nn(kSingle, w.o, w.weighted, entering);
    decay->scores(w.scores, q, k);
    lower_times(kSingle, w.o, w.scores, v, true);
    decay->scores(w.scores, q, b);
    lower_times(kSingle, w.o, w.scores, corrected, true);
  }

  void prepare_back() override {
    Work& w = work();
    decay->scores(scores_k, q, k);
    decay->scores(scores_b, q, b);
    lower_t_times(kSingle, dcorrected, scores_b, dout, false);
    decay->weight_queries(w.weighted, q);
    product_tn(kSingle, update, w.weighted, dout);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    const Mat ds = dstate.col_range(first, count), du = dcorrected->col_range(first, count);
    copy(leaving->col_range(first, count), ds);
    product_nn(kSingle, du, keys, ds, true);
    product_tn(kSingle, update->col_range(first, count), y, du, true);
    decay->carry_back(ds, update->col_range(first, count));
  }
  void finish_back() override {
    Work& w = work();
    if (w.da->rows == 0) {
      w.da = Buffer(sizes.chunk, sizes.keys);
      w.db = Buffer(sizes.chunk, sizes.keys);
    }
    decay->begin_log_grad();
    for (auto* m : {&w.dq, &w.dk, &w.db}) fill(*m, 0.f);
    // o = scores(q, k) V + scores(q, b) U + (e^c q) S
    lower_of_nt(tokens, w.dscores, dout, v);
    split_diagonal(w.dscores, diagonals[0].data());
    decay->scores_grad(w.dscores, q, k, scores_k, w.dq, w.dk);
    lower_of_nt(kSingle, w.dscores, dout, corrected);
    split_diagonal(w.dscores, diagonals[1].data());
    decay->scores_grad(w.dscores, q, b, scores_b, w.dq, w.db);
    product_nt(kSingle, w.dwide, dout, entering);
    decay->weight_queries_grad(w.dwide);
    add(w.dq, w.dwide);
    decay->add_query(q, w.dq);
    // (I − L_b) U = L_k V + (e^c a) S, where a stands one row earlier; r is the adjoint of its right-hand side
    const Mat r = w.o;
    lower_t_times(kSingle, r, inverse, dcorrected, false);
    product_nt(kSingle, w.dwide, r, entering);
    earlier(w.da, w.dwide);
    decay->weight_queries_grad(w.da);
    copy(w.weighted->row_range(0, 1), w.dwide->row_range(0, 1));  // the gradient of the first token's a
    system_grad(v, k, w.dk, diagonals[2].data());
    system_grad(corrected, b, w.db, diagonals[3].data());
    decay->add_query(above, w.da);
    decay->add_key(k, w.dk);
    decay->add_key(b, w.db);
    // outgoing state = e^{c_C} S + (e^{c_C − c} k)ᵀ V + (e^{c_C − c} b)ᵀ U
    write_grad(v, k, w.dk);
    write_grad(corrected, b, w.db);
    add_diagonal(w.dq, w.dk, q, k, diagonals[0]);
    add_diagonal(w.dq, w.db, q, b, diagonals[1]);
    add_diagonal(w.da, w.dk, above, k, diagonals[2]);
    add_diagonal(w.da, w.db, above, b, diagonals[3]);
    later(w.da, w.da);
    copy(w.da->row_range(0, 1), w.weighted->row_range(0, 1));
    lower_t_times(kSingle, w.dv, scores_k, dout, false);
    decay->weight_keys(w.weighted, k);
    product_nn(kSingle, w.dv, w.weighted, leaving, true);
    lower_t_times(kSingle, w.dv, from_keys, r, true);
    decay->log_grad(entering, leaving, w.dg);
  }

 private:
  // From L_y: adds to da and dy all but the diagonal of scores(above, y), which it returns.
  void system_grad(const Mat& values, const Mat& y, const Mat& dy, float* diagonal) {
    Work& w = work();
    lower_of_nt(kSingle, w.dscores, w.o, values);
    earlier(w.dscores, w.dscores);
    lower(w.dscores, false);
    split_diagonal(w.dscores, diagonal);
    decay->scores_grad(w.dscores, above, y, w.scores, w.da, dy);
  }
  void write_grad(const Mat& values, const Mat& y, const Mat& dy) {
    Work& w = work();
    product_nt(kSingle, w.dwide, values, leaving);
    decay->weight_keys_grad(w.dwide);
    decay->add_write(y, w.dwide);
    add(dy, w.dwide);
  }

  Buffer above, inverse, from_keys, corrected, y, keys;
  Buffer scores_k, scores_b, dcorrected;
  std::vector<float> diagonals[4];
};

}  // namespace

std::unique_ptr<Chunk> make_dplr(Precision tokens, DecayKind kind, Sizes sizes) {
  return std::make_unique<DPLRChunk>(tokens, kind, sizes);
}

}  // namespace halflife
