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

// Sizes of a chunk, multiples of 16.
struct Sizes {
  int64_t chunk, keys, values;
};

class Chunk {
 public:
  Chunk(Precision precision, DecayKind kind, Sizes n)
      : p(precision), decay(make_decay(kind, precision, n.chunk, n.keys)), wide(decay->states() * n.keys),
        q(n.chunk, n.keys), k(n.chunk, n.keys), v(n.chunk, n.values), o(n.chunk, n.values),
        entering(wide, n.values), update(wide, n.values), weighted(n.chunk, wide), scores(n.chunk, n.chunk) {}
  virtual ~Chunk() = default;

  // Memory of the backward pass.
  virtual void make_grads(Sizes n) {
    for (auto* x : {&dq, &dk}) *x = Buffer(n.chunk, n.keys);
    for (auto* x : {&dov, &dv}) *x = Buffer(n.chunk, n.values);
    dg = Buffer(n.chunk, decay->log_decays().cols);
    leaving = Buffer(wide, n.values);
    back = Buffer(wide, n.values);
    dscores = Buffer(n.chunk, n.chunk);
    dwide = Buffer(n.chunk, wide);
    diagonal.resize(n.chunk);
  }

  virtual void prepare() = 0;
  virtual void walk(const Mat& state, int64_t first, int64_t count) = 0;
  virtual void finish() = 0;
  virtual void prepare_back() = 0;
  virtual void walk_back(const Mat& dstate, int64_t first, int64_t count) = 0;
  virtual void finish_back() = 0;

  Precision p;
  std::unique_ptr<Decay> decay;
  int64_t wide;                     // K', rows of all states of a head
  Buffer q, k, v, o;                // the queries carry the scale
  Buffer entering, update;          // the state before the chunk, and what the chunk adds to it
  Buffer weighted, scores;          // scratch [C, K'], [C, C]
  Buffer dov, dq, dk, dv, dg;       // `dov` is the gradient of the outputs
  Buffer leaving, back;             // the gradient of the state after the chunk, and what the chunk adds to it
  Buffer dscores, dwide;
  std::vector<float> diagonal;
  std::vector<float> beta, dbeta;   // of the delta rule
  Buffer a, b, da, db;              // of DPLR

 protected:
  // dq, dk += the gradient of the diagonal of scores(q, k), on which no decay acts.
  void add_diagonal(const Mat& dx, const Mat& dy, const Mat& x, const Mat& y, const float* weights) {
    add_scaled_rows(dx, y, weights);
    add_scaled_rows(dy, x, weights);
  }
};

std::unique_ptr<Chunk> make_linear(Precision precision, DecayKind kind, Sizes sizes);
std::unique_ptr<Chunk> make_delta(Precision precision, DecayKind kind, Sizes sizes);
std::unique_ptr<Chunk> make_dplr(Precision precision, DecayKind kind, Sizes sizes);

}  // namespace halflife
