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

void multiply(const Mat& c, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, bool add) {
  if (has_micro_kernels(Precision::float32))
    brgemm(c.rows, c.cols, depth, lda, ldb, c.ld, add, a, b, c.data);
  else
    portable(c, a, lda, b, ldb, depth, add);
}

// ------------------------------------------------------------------------------------------------ bfloat16

// Rows of `in` (or of its transpose) in bfloat16.
const BF16* round_left(const Mat& in, bool transposed) {
  const int64_t rows = transposed ? in.cols : in.rows, cols = transposed ? in.rows : in.cols;
  Mat source = in;
  if (transposed) {
    source = {scratch<float>(0, rows * cols), rows, cols, cols};
    transpose(source, in);
  }
  BF16* out = scratch<BF16>(0, rows * cols);
  for (int64_t i = 0; i < rows; i++) at::vec::convert(source.row(i), out + i * cols, cols);
  return out;
}

// `in` (or its transpose) in bfloat16, two rows interleaved: what the dot-product instructions read.
const BF16* round_right(const Mat& in, bool transposed) {
  const int64_t rows = transposed ? in.cols : in.rows, cols = transposed ? in.rows : in.cols;
  Mat source = in;
  if (transposed) {
    source = {scratch<float>(1, rows * cols), rows, cols, cols};
    transpose(source, in);
  }
  BF16* out = scratch<BF16>(1, rows * cols);
  using Pairs = at::vec::Vectorized<BF16>;
  for (int64_t i = 0; i < rows; i += 2) {
    const float *even = source.row(i), *odd = source.row(i + 1);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out + i * cols);
    // A vector of 16-bit numbers from two vectors of floats; then each pair of rows is zipped.
    alignas(64) BF16 a[Pairs::size()], b[Pairs::size()];
    for (int64_t j = 0; j < cols; j += kLane) {
      at::vec::convert(even + j, a, kLane);
      at::vec::convert(odd + j, b, kLane);
      for (int64_t l = 0; l < kLane; l++) pairs[j + l] = a[l].x | static_cast<uint32_t>(b[l].x) << 16;
    }
  }
  return out;
}

// Rounds both factors to bfloat16 and multiplies them in float32, which is what the micro-kernels compute.
void portable_bfloat16(const Mat& c, const Mat& a, bool ta, const Mat& b, bool tb, bool add) {
  auto rounded = [](const Mat& in, bool transposed, int which) {
    const int64_t rows = transposed ? in.cols : in.rows, cols = transposed ? in.rows : in.cols;
    Mat out{scratch<float>(which, rows * cols), rows, cols, cols};
    transposed ? transpose(out, in) : copy(out, in);
    for (int64_t i = 0; i < rows * cols; i++) out.data[i] = static_cast<float>(static_cast<BF16>(out.data[i]));
    return out;
  };
  const Mat left = rounded(a, ta, 0), right = rounded(b, tb, 1);
  portable(c, left.data, left.ld, right.data, right.ld, left.cols, add);
}

void general(Precision p, const Mat& c, const Mat& a, bool ta, const Mat& b, bool tb, bool add) {
  const int64_t depth = ta ? a.rows : a.cols;
  if (p == Precision::bfloat16) {
    if (!has_micro_kernels(p)) return portable_bfloat16(c, a, ta, b, tb, add);
    const BF16 *left = round_left(a, ta), *right = round_right(b, tb);
    return brgemm(c.rows, c.cols, depth, depth, c.cols, c.ld, add, left, right, c.data);
  }
  Mat left = a, right = b;
  if (ta) transpose(left = {scratch<float>(0, a.rows * a.cols), a.cols, a.rows, a.rows}, a);
  if (tb) transpose(right = {scratch<float>(1, b.rows * b.cols), b.cols, b.rows, b.rows}, b);
  multiply(c, left.data, left.ld, right.data, right.ld, depth, add);
}

constexpr int64_t kPanel = 32;  // rows of a panel of a triangular matrix

}  // namespace

bool has_micro_kernels(Precision precision) {
  static const bool float32 = probe<float>(), bfloat16 = probe<BF16>();
  return precision == Precision::float32 ? float32 : bfloat16;
}

void release(Precision precision) {
  if (has_micro_kernels(precision)) at::native::cpublas::brgemm_release(precision == Precision::bfloat16);
}

void product_nn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  general(p, c, a, false, b, false, add);
}
void product_nt(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  general(p, c, a, false, b, true, add);
}
void product_tn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add) {
  general(p, c, a, true, b, false, add);
}

void lower_of_nt(Precision p, const Mat& c, const Mat& a, const Mat& b) {
  for (int64_t r = 0; r < c.rows; r += kPanel) {
    const int64_t n = std::min(kPanel, c.rows - r), width = r + n;
    product_nt(p, c.row_range(r, n).col_range(0, width), a.row_range(r, n), b.row_range(0, width));
  }
  lower(c, false);
}

void lower_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add) {
  for (int64_t r = 0; r < c.rows; r += kPanel) {
    const int64_t n = std::min(kPanel, c.rows - r), width = r + n;
    product_nn(p, c.row_range(r, n), l.row_range(r, n).col_range(0, width), b.row_range(0, width), add);
  }
}

void lower_t_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add) {
  for (int64_t r = 0; r < c.rows; r += kPanel) {
    const int64_t n = std::min(kPanel, c.rows - r), depth = c.rows - r;
    product_tn(p, c.row_range(r, n), l.row_range(r, depth).col_range(r, n), b.row_range(r, depth), add);
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
