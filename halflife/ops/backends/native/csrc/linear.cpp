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
    Work& w = work();
    decay->prepare();
    decay->weight_keys(w.weighted, k);
    product_tn(kSingle, update, w.weighted, v);
  }
  void walk(const Mat& state, int64_t first, int64_t count) override {
    copy(entering->col_range(first, count), state.col_range(first, count));
    decay->carry(state.col_range(first, count), update->col_range(first, count));
  }
  void finish() override {
    Work& w = work();
    decay->weight_queries(w.weighted, q);
    product_nn(kSingle, w.o, w.weighted, entering);
    decay->scores(w.scores, q, k);
    lower_times(kSingle, w.o, w.scores, v, true);
  }

  void prepare_back() override {
    Work& w = work();
    decay->weight_queries(w.weighted, q);
    product_tn(kSingle, update, w.weighted, dout);
  }
  void walk_back(const Mat& dstate, int64_t first, int64_t count) override {
    copy(leaving->col_range(first, count), dstate.col_range(first, count));
    decay->carry_back(dstate.col_range(first, count), update->col_range(first, count));
  }
  void finish_back() override {
    Work& w = work();
    decay->begin_log_grad();
    decay->scores(w.scores, q, k);
    lower_t_times(kSingle, w.dv, w.scores, dout, false);
    decay->weight_keys(w.weighted, k);
    product_nn(kSingle, w.dv, w.weighted, leaving, true);

    lower_of_nt(tokens, w.dscores, dout, v);
    split_diagonal(w.dscores, w.diagonal.data());
    fill(w.dq, 0.f);
    fill(w.dk, 0.f);
    decay->scores_grad(w.dscores, q, k, w.scores, w.dq, w.dk);
    decay->add_key(k, w.dk);

    product_nt(kSingle, w.dwide, dout, entering);
    decay->weight_queries_grad(w.dwide);
    decay->add_states(w.dq, w.dwide);
    decay->add_read(q, w.dwide);
    decay->add_query(q, w.dq);

    product_nt(kSingle, w.dwide, v, leaving);
    decay->weight_keys_grad(w.dwide);
    decay->add_write(k, w.dwide);
    decay->add_states(w.dk, w.dwide);
    add_diagonal(w.dq, w.dk, q, k, w.diagonal);
    decay->log_grad(entering, leaving, w.dg);
  }
};

}  // namespace

std::unique_ptr<Chunk> make_linear(Precision tokens, DecayKind kind, Sizes sizes) {
  return std::make_unique<LinearChunk>(tokens, kind, sizes);
}

}  // namespace halflife
