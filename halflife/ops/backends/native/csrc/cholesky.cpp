#include "cholesky.h"

#include <cmath>

namespace halflife {
namespace {

constexpr int64_t kVecs = kLane / Vec::size();
constexpr int64_t kRows = kVecs == 1 ? 8 : 4;  // rows of sums that fit into the registers with their vectors

// c −= a b for a tile c [16, 16]. The entry (i, k) of a stands at a[i · row + k · column].
void subtract_product(float* c, int64_t ldc, const float* a, int64_t row, int64_t column, const float* b, int64_t ldb,
                      int64_t depth) {
  for (int64_t first = 0; first < kLane; first += kRows) {
    float* out = c + first * ldc;
    const float* left = a + first * row;
    Vec sums[kRows][kVecs];
    for (int64_t i = 0; i < kRows; i++)
      for (int64_t v = 0; v < kVecs; v++) sums[i][v] = Vec(0.f);
    for (int64_t k = 0; k < depth; k++)
      for (int64_t v = 0; v < kVecs; v++) {
        const Vec right = Vec::loadu(b + k * ldb + v * Vec::size());
        for (int64_t i = 0; i < kRows; i++) sums[i][v] = at::vec::fmadd(Vec(left[i * row + k * column]), right, sums[i][v]);
      }
    for (int64_t i = 0; i < kRows; i++)
      for (int64_t v = 0; v < kVecs; v++) {
        float* o = out + i * ldc + v * Vec::size();
        (Vec::loadu(o) - sums[i][v]).store(o);
      }
  }
}

// x[first:] += weight · y[first:].
inline void add_multiple(float* x, float weight, const float* y, int64_t first, int64_t n) {
  const Vec w(weight);
  for (int64_t j = first; j < n; j += Vec::size()) at::vec::fmadd(w, Vec::loadu(y + j), Vec::loadu(x + j)).store(x + j);
}

inline void multiply(float* x, float weight, int64_t first, int64_t n) {
  const Vec w(weight);
  for (int64_t j = first; j < n; j += Vec::size()) (w * Vec::loadu(x + j)).store(x + j);
}

}  // namespace

// Panels of 16 rows. Each is factorised row by row, and its product is then taken from all rows below it.
bool cholesky(const Mat& a) {
  const int64_t n = a.rows;
  for (int64_t p = 0; p < n; p += kLane) {
    for (int64_t j = p; j < p + kLane; j++) {
      float* row = a.row(j);
      if (!(row[j] > 0.f)) return false;
      multiply(row, 1.f / std::sqrt(row[j]), p, n);
      for (int64_t i = j + 1; i < p + kLane; i++) add_multiple(a.row(i), -row[i], row, p, n);
    }
    for (int64_t i = p + kLane; i < n; i += kLane)
      for (int64_t j = i; j < n; j += kLane)
        subtract_product(a.row(i) + j, a.ld, a.row(p) + i, 1, a.ld, a.row(p) + j, a.ld, kLane);
  }
  for (int64_t i = 0; i < n; i++) std::fill_n(a.row(i), i, 0.f);
  return true;
}

// Rows of 16 from the last to the first: X_I = U_II⁻¹ (I − Σ_{K > I} U_IK X_K).
void upper_inverse(const Mat& out, const Mat& u) {
  const int64_t n = u.rows;
  fill(out, 0.f);
  for (int64_t p = n - kLane; p >= 0; p -= kLane) {
    for (int64_t j = p; j < p + kLane; j++) out.row(j)[j] = 1.f;
    const int64_t next = p + kLane;
    for (int64_t j = next; j < n; j += kLane)
      subtract_product(out.row(p) + j, out.ld, u.row(p) + next, u.ld, 1, out.row(next) + j, out.ld, j + kLane - next);
    for (int64_t j = next - 1; j >= p; j--) {
      multiply(out.row(j), 1.f / u.row(j)[j], p, n);
      for (int64_t i = p; i < j; i++) add_multiple(out.row(i), -u.row(i)[j], out.row(j), p, n);
    }
  }
}

}  // namespace halflife
