// Matrix products of a chunk: by oneDNN's micro-kernels where this CPU has them, else by the loop in product.cpp.
//
// In bfloat16 both factors are rounded to it, and sums are float32, so only products of factors that are bfloat16 already
// are done so (`kSingle` stands at all others). An entry of a result depends on its row and column
// alone, not on how a matrix is cut, so that the number of threads changes no bit.
#pragma once
#include "matrix.h"

namespace halflife {

enum class Precision { float32, bfloat16 };
constexpr Precision kSingle = Precision::float32;

// Whether oneDNN's micro-kernels multiply this type here; else the portable loop does.
bool has_micro_kernels(Precision precision);

// Must be called by each thread when it has done its products.
void release(Precision precision);

// The factors of a product may be transposed: N is the matrix as it stands, T its transpose.
void product_nn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add = false);
void product_nt(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add = false);
void product_tn(Precision p, const Mat& c, const Mat& a, const Mat& b, bool add = false);

// Products with lower triangular matrices [C, C], which leave out most of the zeros.
void lower_of_nt(Precision p, const Mat& c, const Mat& a, const Mat& b);                // c = lower part of a bᵀ
void lower_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add);      // c (+)= l b
void lower_t_times(Precision p, const Mat& c, const Mat& l, const Mat& b, bool add);    // c (+)= lᵀ b

// out = inᵀ.
void transpose(const Mat& out, const Mat& in);

// out = (I + L)⁻¹ of a strictly lower triangular L, in float32.
void unit_lower_inverse(const Mat& out, const Mat& l);

}  // namespace halflife
