// Linear attention (halflife/ops/linear_attention.py):
//
//   o = scores(q, k) V + (e^b q) S,      S ← e^{b_C} S + (e^{b_C − b} k)ᵀ V
#include "chunk.h"

namespace halflife {
namespace {

class LinearChunk final : public Chunk {
 public:
  using Chunk::Chunk;

  void prepare() override {
    decay->prepare();
    decay->weight_keys(weighted, k);
    product_tn(p, update, weighted, v);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    copy(entering->col_range(first, count), state.col_range(first, count));
    decay->carry(state.col_range(first, count), update->col_range(first, count));
  }
  void finish() override {
    decay->weight_queries(weighted, q);
    product_nn(p, o, weighted, entering);
    decay->scores(scores, q, k);
    lower_times(p, o, scores, v, true);
  }

  void prepare_back() override {
    decay->weight_queries(weighted, q);
    product_tn(p, back, weighted, dov);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    copy(leaving->col_range(first, count), dstate.col_range(first, count));
    decay->carry_back(dstate.col_range(first, count), back->col_range(first, count));
  }
  void finish_back() override {
    decay->begin_log_grad();
    decay->scores(scores, q, k);
    lower_t_times(p, dv, scores, dov, false);
    decay->weight_keys(weighted, k);
    product_nn(p, dv, weighted, leaving, true);

    lower_of_nt(p, dscores, dov, v);
    split_diagonal(dscores, diagonal.data());
    fill(dq, 0.f);
    fill(dk, 0.f);
    decay->scores_grad(dscores, q, k, scores, dq, dk);
    decay->add_key(k, dk);

    product_nt(p, dwide, dov, entering);
    decay->weight_queries_grad(dwide);
    decay->add_states(dq, dwide);
    decay->add_read(q, dwide);
    decay->add_query(q, dq);

    product_nt(p, dwide, v, leaving);
    decay->weight_keys_grad(dwide);
    decay->add_write(k, dwide);
    decay->add_states(dk, dwide);
    add_diagonal(dq, dk, q, k, diagonal.data());
    decay->log_grad(entering, leaving, dg);
  }
};

}  // namespace

std::unique_ptr<Chunk> make_linear(Precision precision, DecayKind kind, Sizes sizes) {
  return std::make_unique<LinearChunk>(precision, kind, sizes);
}

}  // namespace halflife
