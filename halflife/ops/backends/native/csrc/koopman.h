// Spectral Koopman attention (halflife/ops/koopman/op.py). Tokens go in blocks of S. A block reads the sums before it,
//
//   G = Σ z zᵀ,   M = Σ z_t z_{t−1}ᵀ,   C = Σ v zᵀ,   G̃ = G + ε m² I
//   x_0 = G̃⁻¹ q,   x_i = γ G̃⁻¹ M x_{i−1},   y = C ((1 − μ) x_0 + μ x_K)
//
// and then adds its own tokens to them. Vectors are rows here. The sums of a head are one matrix [G | M | Cᵀ] with
// R rows and 2 R + P columns, and the tokens of a block are rows [z_t | z_{t−1} | v_t], so that one product of keys and
// tokens gives all sums of a block.
#pragma once
#include <limits>
#include <memory>
#include <vector>

#include "product.h"

namespace halflife {

// Whether a squared norm can be the unit m² of the sums; otherwise the unit is 1, as in `unit_of` of solve.py.
inline bool is_unit(float norm) { return norm >= std::numeric_limits<float>::min(); }

struct KoopmanSizes {
  int64_t rank, width;  // R and P, as multiples of 16
  int64_t block;        // tokens of a block
  int64_t rows;         // the same as a multiple of 16
  int64_t power;        // K
  Precision tokens;     // of the products of tokens with tokens, which are exact in bfloat16 if the tokens are bfloat16
  int64_t columns() const { return 2 * rank + width; }
};

struct KoopmanSettings {
  float gamma, mix;
  double ridge;
  bool whole_sequence;  // whether m² is the largest squared norm of the whole sequence, `largest`
  float largest = 0.f;
};

// Rows of tensors that the next block needs. They are fetched into the cache a few at a time, between the products of a
// block, because a head's rows lie far apart and the processor does not foresee them.
class Ahead {
 public:
  // Begin anew; the rows will be fetched in `parts` parts.
  void start(int64_t parts) {
    count_ = next_ = 0;
    parts_ = parts;
  }
  // `rows` rows of `bytes` bytes from `data` on, `step` bytes apart; `write` if they will be overwritten.
  void add(const char* data, int64_t step, int64_t bytes, int64_t rows, bool write) {
    if (rows > 0) spans_[count_++] = {data, step, bytes, rows, write};
  }
  // Fetch one part.
  void fetch() {
    for (int64_t s = 0; s < count_; s++) {
      const Span& span = spans_[s];
      const int64_t last = span.rows * std::min(next_ + 1, parts_) / parts_;
      for (int64_t i = span.rows * next_ / parts_; i < last; i++)
        for (int64_t b = 0; b < span.bytes; b += 64) {
          const char* line = span.data + i * span.step + b;
          span.write ? __builtin_prefetch(line, 1, 2) : __builtin_prefetch(line, 0, 2);
        }
    }
    next_ = std::min(next_ + 1, parts_);
  }

 private:
  static constexpr int64_t kSpans = 8;
  struct Span {
    const char* data;
    int64_t step, bytes, rows;
    bool write;
  };
  Span spans_[kSpans];
  int64_t count_ = 0, next_ = 0, parts_ = 1;
};

// What the backward pass keeps of a block, between the walk over the sums and the walk back.
struct KoopmanSlot {
  KoopmanSlot(const KoopmanSizes& n, bool grads, bool tokens);

  Buffer sums;                 // before the block; later the gradient of the sums after the block
  float norm = 0;              // m² before the block; `dnorm` is the gradient of m² after the block
  float dnorm = 0;
  // From `read_grad`: the share of the gradients of γ, μ, m² before the block, and m² of the whole sequence.
  double dgamma = 0, dmix = 0, dentering = 0, dlargest = 0;
  float largest = 0;           // the largest squared norm in the block, and its row
  int64_t row = 0;
  bool record() const { return largest >= norm; }  // whether m² after the block is the norm of a key of the block
  Buffer xs, bs;               // of operators of single tokens: their x_i, and the gradients b_i of the right-hand sides
  std::vector<float> dbefore, dlast;  // gradients of the key before the block, and of its last key
};

// The operators that read in a block: one for all its tokens, or one a token.
class KoopmanBlock {
 public:
  explicit KoopmanBlock(const KoopmanSizes& sizes, bool grads);
  virtual ~KoopmanBlock() = default;

  // How often `read` (with the products before it) and `read_grad` fetch a part of what is `ahead`.
  int64_t parts() const { return n.power > 0 ? 7 + n.power : 5; }
  int64_t parts_back() const { return n.power > 0 ? 12 + 2 * n.power : 10; }

  // Prepare the operator of a slot for `read` and `read_grad`, unless every token has its own.
  virtual void fit(const KoopmanSlot&) {}
  // y ← outputs of the queries q. Only the first `count` rows are tokens.
  virtual void read(const KoopmanSlot& slot, int64_t count) = 0;
  // From dy: dq, and into `slot` the gradient of the sums that were read, which are those of `fitted`, and its other
  // shares. Both may be one slot.
  virtual void read_grad(KoopmanSlot& slot, const KoopmanSlot& fitted, int64_t count) = 0;
  // From the gradient of the sums after the block: dtokens = [dz | dz_{t−1} | dv], where dz includes the gradient of
  // z_{t−1} of the row below, and `dbefore` of the slot.
  virtual void sums_grad(KoopmanSlot& slot, int64_t count) = 0;

  // The sums over the tokens of the block.
  void sum_tokens(const Mat& out);
  // The largest squared norm of the keys of the block, and its row.
  void largest_norm(KoopmanSlot& slot, int64_t count) const;

  KoopmanSizes n;
  KoopmanSettings settings{};
  int64_t retries = 0;                      // factorisations that were repeated
  Ahead ahead;
  Buffer tokens, q, y;
  Buffer dy, dq, dtokens;

 protected:
  float unit_of(float norm) const;
  // The upper factor U of G / m² + ε I.
  void factorise(const Mat& gram, float unit);
  // sums ← −Σ b_iᵀ x_i, γ Σ b_iᵀ x_{i−1} and Σ x dy for the rows of all x_i and b_i.
  void gradient_of_sums(const Mat& sums, const Mat& xs, const Mat& bs);
  void mix(const Mat& out, const Mat& first, const Mat& last) const;  // (1 − μ) x_0 + μ x_K

  Buffer factor, transposed, mixed, right;  // scratch [R, R], [R, (K + 1) S], [S, R], [S, R]
};

std::unique_ptr<KoopmanBlock> make_koopman_block(const KoopmanSizes& sizes, bool tokens, bool grads);

// factor ← U with Uᵀ U = gram / unit + ridge I. A matrix whose factorisation fails is factorised again with a larger
// ridge, as by `cholesky` of halflife/ops/koopman/solve.py. Returns the number of repetitions.
int64_t factorise_gram(const Mat& factor, const Mat& gram, float unit, double ridge);

// The inverse factor `lower` = L⁻¹ of an operator after the key z (in units of m) was added to G (`rank_one` of
// solve.py, whose L⁻ᵀ is the transpose). `w` and `sums` are scratch of R numbers.
void rank_one(const Mat& lower, const float* z, float* w, float* sums);

// out[i] = the product of row i of m with x.
void row_products(float* out, const Mat& m, const float* x);
// out = Σ weights[i] · row i of m.
void sum_rows(float* out, const Mat& m, const float* weights);

}  // namespace halflife
