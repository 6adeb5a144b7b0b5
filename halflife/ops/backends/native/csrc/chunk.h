// One chunk of an op on a state: what `ChunkBlock` is in halflife/ops/chunked/blocks.py.
//
// The walk (walk.cpp) calls the members in this order:
//
//   forward     prepare · walk · finish
//   backward    prepare · walk · prepare_back · walk_back · finish_back
//
// The walks pass the state from chunk to chunk and are cut by columns of the state. The others need no other chunk.
#pragma once
#include <memory>
#include <vector>

#include "decay.h"
#include "matrix.h"
#include "product.h"

namespace halflife {

// Sizes of a chunk, multiples of 16, and the states of a head.
struct Sizes {
  int64_t chunk, keys, values, states;
  bool operator==(const Sizes&) const = default;
};

// Memory that a thread uses for one chunk after the other. It stays in cache, which the memory of many chunks would not.
struct Work {
  Work(Sizes n, int64_t wide)
      : sizes(n), wide(wide), weighted(n.chunk, wide), dwide(n.chunk, wide), o(n.chunk, n.values), dv(n.chunk, n.values),
        dq(n.chunk, n.keys), dk(n.chunk, n.keys), scores(n.chunk, n.chunk), dscores(n.chunk, n.chunk),
        dg(n.chunk, std::max(n.keys, kLane)), dbeta(n.chunk), diagonal(n.chunk) {}

  Sizes sizes;
  int64_t wide;
  Buffer weighted, dwide;              // [C, K']
  Buffer o, dv, dq, dk;                // outputs and gradients, to be stored at once
  Buffer scores, dscores;
  Buffer dg;
  std::vector<float> dbeta, diagonal;  // of the delta rule; of a square matrix
  Buffer da, db;                       // of DPLR
};

// The memory of this thread, for chunks of these sizes.
Work& work_of_thread(Sizes sizes, int64_t wide);

class Chunk {
 public:
  Chunk(Precision tokens, DecayKind kind, Sizes n)
      : tokens(tokens), sizes(n), decay(make_decay(kind, tokens, n.chunk, n.keys)), wide(decay->states() * n.keys),
        q(n.chunk, n.keys), k(n.chunk, n.keys), v(n.chunk, n.values), entering(wide, n.values), update(wide, n.values) {}
  virtual ~Chunk() = default;

  // Memory of the backward pass.
  virtual void make_grads() {
    dout = Buffer(sizes.chunk, sizes.values);
    leaving = Buffer(wide, sizes.values);
  }

  virtual void prepare() = 0;
  virtual void walk(const Mat& state, int64_t first, int64_t count) = 0;
  virtual void finish() = 0;  // writes the outputs into `work().o`
  virtual void prepare_back() = 0;
  virtual void walk_back(const Mat& dstate, int64_t first, int64_t count) = 0;
  virtual void finish_back() = 0;  // writes the gradients into `work()`

  Work& work() const { return work_of_thread(sizes, wide); }

  Precision tokens;           // of products of tokens with tokens, which bfloat16 holds if the tokens are bfloat16
  Sizes sizes;
  std::unique_ptr<Decay> decay;
  int64_t wide;               // K', rows of all states of a head
  Buffer q, k, v;             // the queries carry the scale, and the values their gain
  std::vector<float> gain;    // factors of the values, if there are any
  std::vector<float> beta;    // of the delta rule
  Buffer a, b;                // of DPLR
  Buffer entering;            // the state before the chunk
  Buffer update;              // what the chunk adds to the state, or on the way back to its gradient
  Buffer dout, leaving;       // the gradients of the outputs and of the state after the chunk
};

// dx, dy += the gradient of the diagonal of scores(x, y), on which no decay acts.
inline void add_diagonal(const Mat& dx, const Mat& dy, const Mat& x, const Mat& y, const std::vector<float>& weights) {
  add_scaled_rows(dx, y, weights.data());
  add_scaled_rows(dy, x, weights.data());
}

std::unique_ptr<Chunk> make_linear(Precision tokens, DecayKind kind, Sizes sizes);
std::unique_ptr<Chunk> make_delta(Precision tokens, DecayKind kind, Sizes sizes);
std::unique_ptr<Chunk> make_dplr(Precision tokens, DecayKind kind, Sizes sizes);

}  // namespace halflife
