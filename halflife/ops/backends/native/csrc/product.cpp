#include "product.h"

#include <ATen/native/CPUBlas.h>

#include <vector>

namespace halflife {
namespace {

using at::native::cpublas::brgemm;
using BF16 = at::BFloat16;

// Scratch of a thread for transposed and rounded factors.
template <class T>
T* scratch(int which, int64_t count) {
  thread_local std::vector<T> memory[2];
  auto& m = memory[which];
  if (static_cast<int64_t>(m.size()) < count) m.resize(count);
  return m.data();
}

template <class T>
bool probe() {
  std::vector<T> a(256), b(256);
  std::vector<float> c(256);
  try {
    brgemm(16, 16, 16, 16, 16, 16, false, a.data(), b.data(), c.data());
    at::native::cpublas::brgemm_release(std::is_same_v<T, BF16>);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// ------------------------------------------------------------------------------------------- the portable loop

constexpr int64_t kRows = 4;  // rows of a tile: 4 x 16 sums fit into the registers of AVX2
constexpr int64_t kVecs = kLane / Vec::size();

void tile(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Vec sums[kRows][kVecs];
  for (int64_t i = 0; i < kRows; i++)
    for (int64_t j = 0; j < kVecs; j++) sums[i][j] = add ? Vec::loadu(c + i * ldc + j * Vec::size()) : Vec(0.f);
  for (int64_t k = 0; k < depth; k++)
    for (int64_t j = 0; j < kVecs; j++) {
      const Vec right = Vec::loadu(b + k * ldb + j * Vec::size());
      for (int64_t i = 0; i < kRows; i++) sums[i][j] = at::vec::fmadd(Vec(a[i * lda + k]), right, sums[i][j]);
    }
  for (int64_t i = 0; i < kRows; i++)
    for (int64_t j = 0; j < kVecs; j++) sums[i][j].store(c + i * ldc + j * Vec::size());
}

void portable(const Mat& c, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, bool add) {
  for (int64_t j = 0; j < c.cols; j += kLane)
    for (int64_t i = 0; i < c.rows; i += kRows) tile(depth, a + i * lda, lda, b + j, ldb, c.row(i) + j, c.ld, add);
}

// ------------------------------------------------------------------------------------------------- factors

// A factor as the micro-kernels read it: float32, or bfloat16 (on the right with two rows interleaved).
struct Factor {
  const float* wide = nullptr;
  const BF16* half = nullptr;
  int64_t ld = 0;

  // Without the first rows; a right factor in bfloat16 must lose an even number.
  Factor from_row(int64_t row) const { return {wide ? wide + row * ld : nullptr, half ? half + row * ld : nullptr, ld}; }
  Factor from_col(int64_t col) const { return {wide ? wide + col : nullptr, half ? half + col : nullptr, ld}; }
};

void round_rows(const Mat& in, BF16* out) {
  for (int64_t i = 0; i < in.rows; i++) at::vec::convert(in.row(i), out + i * in.cols, in.cols);
}

// Two rows of bfloat16 interleaved, which is what the dot-product instructions read.
void round_pairs(const Mat& in, BF16* out) {
  for (int64_t i = 0; i < in.rows; i += 2) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out + i * in.cols);
    alignas(64) BF16 even[kLane], odd[kLane];
    for (int64_t j = 0; j < in.cols; j += kLane) {
      at::vec::convert(in.row(i) + j, even, kLane);
      at::vec::convert(in.row(i + 1) + j, odd, kLane);
      for (int64_t l = 0; l < kLane; l++) pairs[j + l] = even[l].x | static_cast<uint32_t>(odd[l].x) << 16;
    }
  }
}

enum Side { kLeft = 0, kRight = 1 };

Factor factor(Precision p, Side side, const Mat& in, bool transposed) {
  Mat source = in;
  if (transposed) {
    source = {scratch<float>(side, in.rows * in.cols), in.cols, in.rows, in.rows};
    transpose(source, in);
  }
  if (p == Precision::float32) return {source.data, nullptr, source.ld};
  const int64_t count = source.rows * source.cols;
  if (has_micro_kernels(p)) {
    BF16* out = scratch<BF16>(side, count);
    (side == kLeft ? round_rows : round_pairs)(source, out);
    return {nullptr, out, source.cols};
  }
  float* out = scratch<float>(side, count);  // may be the transpose itself
  for (int64_t i = 0; i < source.rows; i++)
    for (int64_t j = 0; j < source.cols; j++) out[i * source.cols + j] = static_cast<BF16>(source.row(i)[j]);
  return {out, nullptr, source.cols};
}

void multiply(const Mat& c, const Factor& a, const Factor& b, int64_t depth, bool add) {
  if (a.half)
    brgemm(c.rows, c.cols, depth, a.ld, b.ld, c.ld, add, a.half, b.half, c.data);
  else if (has_micro_kernels(Precision::float32))
    brgemm(c.rows, c.cols, depth, a.ld, b.ld, c.ld, add, a.wide, b.wide, c.data);
  else
    portable(c, a.wide, a.ld, b.wide, b.ld, depth, add);
}

// Rows of a panel of a triangular matrix: small panels leave out more zeros, large ones multiply faster.
int64_t panel(Precision p) { return p == Precision::float32 ? kLane : 2 * kLane; }

}  // namespace

bool has_micro_kernels(Precision precision) {
  static const bool float32 = probe<float>(), bfloat16 = probe<BF16>();
  return precision == Precision::float32 ? float32 : bfloat16;
}

void release(Precision precision) {
  if (has_micro_kernels(precision)) at::native::cpublas::brgemm_release(precision == Precision::bfloat16);
}

void product_nn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  multiply(c, factor(p, kLeft, a, false), factor(p, kRight, b, false), a.cols, add);
}
void product_nt(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  multiply(c, factor(p, kLeft, a, false), factor(p, kRight, b, true), a.cols, add);
}
void product_tn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  multiply(c, factor(p, kLeft, a, true), factor(p, kRight, b, false), a.rows, add);
}

void lower_of_nt(Precision p, const Mat& c, const Mat& a, const Mat& b) {
  const Factor left = factor(p, kLeft, a, false), right = factor(p, kRight, b, true);
  for (int64_t r = 0; r < c.rows; r += panel(p)) {
    const int64_t n = std::min(panel(p), c.rows - r);
    multiply(c.row_range(r, n).col_range(0, r + n), left.from_row(r), right, a.cols, false);
  }
  lower(c, false);
}

void lower_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add) {
  const Factor left = factor(p, kLeft, l, false), right = factor(p, kRight, b, false);
  for (int64_t r = 0; r < c.rows; r += panel(p)) {
    const int64_t n = std::min(panel(p), c.rows - r);
    multiply(c.row_range(r, n), left.from_row(r), right, r + n, add);
  }
}

void lower_t_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add) {
  const Factor left = factor(p, kLeft, l, true), right = factor(p, kRight, b, false);
  for (int64_t r = 0; r < c.rows; r += panel(p)) {
    const int64_t n = std::min(panel(p), c.rows - r);
    multiply(c.row_range(r, n), left.from_row(r).from_col(r), right.from_row(r), c.rows - r, add);
  }
}

void transpose(const Mat& out, const Mat& in) {
  for (int64_t i = 0; i < in.rows; i += kLane)
    for (int64_t j = 0; j < in.cols; j += kLane) {
      const float* source = in.row(i) + j;
      float* target = out.row(j) + i;
#if defined(CPU_CAPABILITY_AVX512)
      at::vec::transpose_mxn<float>(source, in.ld, target, out.ld, kLane, kLane);
#else
      for (int64_t a = 0; a < kLane; a++)
        for (int64_t b = 0; b < kLane; b++) target[b * out.ld + a] = source[a * in.ld + b];
#endif
    }
}

// Tiles of 16 rows. A diagonal tile is inverted row by row; below it stands −T_ii (Σ_m L_im T_mj).
void unit_lower_inverse(const Mat& out, const Mat& l) {
  fill(out, 0.f);
  alignas(64) float product[kLane * kLane];
  for (int64_t i = 0; i < l.rows; i += kLane) {
    Mat diagonal = out.row_range(i, kLane).col_range(i, kLane);
    for (int64_t r = 0; r < kLane; r++) {
      Vec row[kVecs];
      for (int64_t v = 0; v < kVecs; v++) row[v] = Vec(0.f);
      for (int64_t c = 0; c < r; c++) {
        const Vec weight(-l.row(i + r)[i + c]);
        for (int64_t v = 0; v < kVecs; v++)
          row[v] = at::vec::fmadd(weight, Vec::loadu(diagonal.row(c) + v * Vec::size()), row[v]);
      }
      for (int64_t v = 0; v < kVecs; v++) row[v].store(diagonal.row(r) + v * Vec::size());
      diagonal.row(r)[r] = 1.f;
    }
    for (int64_t j = 0; j < i; j += kLane) {
      const Mat sums{product, kLane, kLane, kLane};
      const Mat left = l.row_range(i, kLane).col_range(j, i - j);
      portable(sums, left.data, left.ld, out.row(j) + j, out.ld, i - j, false);
      const Mat target = out.row_range(i, kLane).col_range(j, kLane);
      portable(target, diagonal.data, diagonal.ld, product, kLane, kLane, false);
      each([](Vec x) { return x.neg(); }, target);
    }
  }
}

}  // namespace halflife
