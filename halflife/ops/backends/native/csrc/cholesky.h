// Factors of positive definite matrices, in float32. All sizes are multiples of 16.
#pragma once
#include "matrix.h"

namespace halflife {

// Factorise `a` in place: a = Uᵀ U with an upper triangular U, whose lower part becomes 0. Only the upper part of `a`
// is read. Returns false where a pivot is not positive.
bool cholesky(const Mat& a);

// out = U⁻¹ of an upper triangular U.
void upper_inverse(const Mat& out, const Mat& u);

}  // namespace halflife
