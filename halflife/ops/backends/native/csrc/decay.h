// Decays inside a chunk: the weights that its log-decays give to each product. The members have the names and the
// meaning of halflife/ops/chunked/decays.py and gate_decay.py, which derive them.
#pragma once
#include <cmath>
#include <memory>
#include <vector>

#include "matrix.h"
#include "product.h"

namespace halflife {

enum class DecayKind { none, scalar, vector, gate };

// The decay of one chunk of `chunk` tokens, for keys of `keys` channels (both multiples of 16).
//
// `K'` is the number of rows of all states of a head. The members `…_grad` overwrite the gradient that they get.
class Decay {
 public:
  Decay(Precision tokens, int64_t chunk, int64_t keys) : tokens_(tokens), chunk_(chunk), keys_(keys) {}
  virtual ~Decay() = default;

  // Log-decays of a chunk, one row a token; rows without a token are 0. Their columns: 1 (scalar), K (vector),
  // 2 (gate: slow, fast).
  Mat log_decays() const { return g_; }
  virtual void prepare() = 0;  // compute the weights from `log_decays()`

  virtual int64_t states() const { return 1; }
  virtual void scores(const Mat& out, const Mat& x, const Mat& y) = 0;             // [C, C], 0 above the diagonal
  virtual void weight_queries(const Mat& out, const Mat& x) = 0;                   // [C, K] → [C, K']
  virtual void weight_keys(const Mat& out, const Mat& k) = 0;                      // [C, K] → [C, K']
  virtual void carry(const Mat& state, const Mat& update) = 0;                     // state ← decayed state + update
  virtual void carry_back(const Mat& grad, const Mat& update) { carry(grad, update); }

  virtual void weight_queries_grad(const Mat& d) { weight_queries(d, d); }         // [C, K'] in place
  virtual void weight_keys_grad(const Mat& d) { weight_keys(d, d); }
  virtual void add_states(const Mat& out, const Mat& d) { add(out, d); }           // out [C, K] += d [C, K'] by state
  // From the gradient of `scores`, whose diagonal is 0 (it is overwritten): dx += …, dy += ….
  virtual void scores_grad(const Mat& grad, const Mat& x, const Mat& y, const Mat& scores, const Mat& dx,
                           const Mat& dy) = 0;

  // The gradient of the log-decays, from all that they weigh; `DecayGrads` of the Python file names the parts.
  virtual void begin_log_grad() = 0;
  virtual void add_query(const Mat& x, const Mat& dx) = 0;
  virtual void add_key(const Mat& y, const Mat& dy) = 0;
  // `factors` are those by which rows of d were multiplied after `weight_queries_grad`.
  virtual void add_read(const Mat&, const Mat&, const float* factors = nullptr) {}
  virtual void add_write(const Mat& k, const Mat& dk) = 0;
  virtual void log_grad(const Mat& entering, const Mat& leaving, const Mat& out) = 0;

 protected:
  Precision tokens_;  // of products of tokens with tokens (see `Chunk`)
  int64_t chunk_, keys_;
  Buffer g_;
};

std::unique_ptr<Decay> make_decay(DecayKind kind, Precision tokens, int64_t chunk, int64_t keys);

// e^g = kept + change, where `kept` is 1 for a slow decay and else 0 (halflife/ops/slow_decay.py): the state becomes
// kept · S + (change · S + update), which does not drift.
constexpr float kSlowDecay = -0.69314718f;  // −ln 2

struct Split {
  float kept = 1.f, change = 0.f;
  Split() = default;
  explicit Split(float g) {
    const bool slow = g > kSlowDecay;
    kept = slow ? 1.f : 0.f;
    change = slow ? std::expm1(g) : std::exp(g);
  }
};

inline Vec decay_and_add(Vec state, Vec kept, Vec change, Vec update) {
  return at::vec::fmadd(state, kept, at::vec::fmadd(state, change, update));
}

// e^x for x ≤ 0, with an error of about one unit in the last place; exactly 0 below −87.
inline Vec exp_nonpositive(Vec x) {
  using at::vec::fmadd;
  const Vec n = (x * Vec(1.44269504f)).round();
  const Vec r = fmadd(n, Vec(2.12194440e-4f), fmadd(n, Vec(-0.693359375f), x));  // x − n ln 2, in two parts
  Vec p(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fmadd(p, r, Vec(c));
  p = fmadd(p * r, r, r + Vec(1.f));
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 vanishes = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), vanishes, _mm512_setzero_ps());
#else
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.f), _CMP_LT_OQ),
                          _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
#endif
}

}  // namespace halflife
