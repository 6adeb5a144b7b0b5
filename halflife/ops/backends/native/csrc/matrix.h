// Row-major float32 matrices of a chunk, and passes over them.
//
// Every number of rows and columns is a multiple of 16 (kLane), with zeros where there is no token or no channel.
// No loop here therefore has a remainder, and every head size and length goes through the same code.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace halflife {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLane = 16;
static_assert(kLane % Vec::size() == 0, "a lane holds whole vectors");

inline int64_t round_up(int64_t n) { return (n + kLane - 1) / kLane * kLane; }

// A view of a matrix; it owns nothing.
struct Mat {
  float* data = nullptr;
  int64_t rows = 0, cols = 0, ld = 0;

  float* row(int64_t i) const { return data + i * ld; }
  Mat row_range(int64_t first, int64_t count) const { return {data + first * ld, count, cols, ld}; }
  Mat col_range(int64_t first, int64_t count) const { return {data + first, rows, count, ld}; }
};

// Memory of one matrix, aligned to a cache line and filled with zeros.
class Buffer {
 public:
  Buffer() = default;
  Buffer(int64_t rows, int64_t cols) : mat_{allocate(rows * cols), rows, cols, cols}, owner_(mat_.data) {}
  operator Mat() const { return mat_; }
  const Mat* operator->() const { return &mat_; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  static float* allocate(int64_t count) {
    const size_t bytes = (std::max<int64_t>(count, 1) * sizeof(float) + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, bytes);
    if (p == nullptr) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    return static_cast<float*>(p);
  }
  Mat mat_;
  std::unique_ptr<float, Free> owner_;
};

// out[i][j] = f(out[i][j], a[i][j], …) for all entries, a vector at a time.
template <class F, class... M>
inline void each(F f, const Mat& out, const M&... in) {
  for (int64_t i = 0; i < out.rows; i++) {
    float* o = out.row(i);
    for (int64_t j = 0; j < out.cols; j += Vec::size()) f(Vec::loadu(o + j), Vec::loadu(in.row(i) + j)...).store(o + j);
  }
}

inline void fill(const Mat& out, float value) {
  for (int64_t i = 0; i < out.rows; i++) std::fill_n(out.row(i), out.cols, value);
}

inline void copy(const Mat& out, const Mat& in) {
  for (int64_t i = 0; i < out.rows; i++) std::memcpy(out.row(i), in.row(i), out.cols * sizeof(float));
}

inline void add(const Mat& out, const Mat& in) {
  each([](Vec o, Vec x) { return o + x; }, out, in);
}

// out[i] = weights[i] · in[i], one weight a row.
inline void scale_rows(const Mat& out, const Mat& in, const float* weights) {
  for (int64_t i = 0; i < out.rows; i++) {
    const Vec w(weights[i]);
    for (int64_t j = 0; j < out.cols; j += Vec::size()) (Vec::loadu(in.row(i) + j) * w).store(out.row(i) + j);
  }
}

// out[i] += weights[i] · in[i].
inline void add_scaled_rows(const Mat& out, const Mat& in, const float* weights) {
  for (int64_t i = 0; i < out.rows; i++) {
    const Vec w(weights[i]);
    float* o = out.row(i);
    for (int64_t j = 0; j < out.cols; j += Vec::size())
      at::vec::fmadd(Vec::loadu(in.row(i) + j), w, Vec::loadu(o + j)).store(o + j);
  }
}

inline float sum(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_add_ps(x);
#else
  alignas(64) float lanes[Vec::size()];
  x.store(lanes);
  for (int64_t half = Vec::size() / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

inline float dot(const float* a, const float* b, int64_t n) {
  Vec s(0.f);
  for (int64_t j = 0; j < n; j += Vec::size()) s = at::vec::fmadd(Vec::loadu(a + j), Vec::loadu(b + j), s);
  return sum(s);
}

// Move every row up by one (token i + 1 into row i); the last row becomes 0. `out` may be `in`.
inline void earlier(const Mat& out, const Mat& in) {
  for (int64_t i = 0; i + 1 < out.rows; i++) std::memcpy(out.row(i), in.row(i + 1), out.cols * sizeof(float));
  std::fill_n(out.row(out.rows - 1), out.cols, 0.f);
}

// Move every row down by one; the first row becomes 0. `out` may be `in`.
inline void later(const Mat& out, const Mat& in) {
  for (int64_t i = out.rows - 1; i > 0; i--) std::memcpy(out.row(i), in.row(i - 1), out.cols * sizeof(float));
  std::fill_n(out.row(0), out.cols, 0.f);
}

// Set the entries at and above the diagonal (strict) or above it to 0.
inline void lower(const Mat& m, bool strict) {
  for (int64_t i = 0; i < m.rows; i++)
    std::fill(m.row(i) + std::min(m.cols, i + (strict ? 0 : 1)), m.row(i) + m.cols, 0.f);
}

// Take the diagonal out of a square matrix.
inline void split_diagonal(const Mat& m, float* diagonal) {
  for (int64_t i = 0; i < m.rows; i++) {
    diagonal[i] = m.row(i)[i];
    m.row(i)[i] = 0.f;
  }
}

}  // namespace halflife
