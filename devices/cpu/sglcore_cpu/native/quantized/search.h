// The scales and zeros of sixteen rows' groups that make the squared error small. Lanes are rows.
#pragma once

#include "weight.h"

namespace sgl::SGL_ISA::quantized {

// weight ~ scale * (code - zero); `error` is the sum of squares that is left.
struct Fit {
    f32x16 scale, zero, error;
};

SGL_INLINE f32x16 clamp(f32x16 x, float low, float high) { return min(max(x, set1(low)), set1(high)); }
// a / b, or 0 where b is not above 0.
SGL_INLINE f32x16 ratio(f32x16 a, f32x16 b) {
    f32x16 safe = where_less(zero(), b, b, set1(1.0f));
    return where_less(zero(), b, div(a, safe), zero());
}
SGL_INLINE void keep_better(Fit& best, const Fit& fit) {
    best.scale = where_less(fit.error, best.error, fit.scale, best.scale);
    best.zero = where_less(fit.error, best.error, fit.zero, best.zero);
    best.error = where_less(fit.error, best.error, fit.error, best.error);
}

// A group's value of largest magnitude, its lowest and highest, the sum of its squares and its sum.
struct Extremes {
    f32x16 signed_most, low, high, squares, sum;
};

SGL_INLINE Extremes extremes(const f32x16* values, int64_t count) {
    Extremes found{zero(), values[0], values[0], zero(), zero()};
    for (int64_t i = 0; i < count; ++i) {
        f32x16 value = values[i];
        found.low = min(found.low, value), found.high = max(found.high, value);
        found.squares = fma(value, value, found.squares), found.sum = add(found.sum, value);
    }
    f32x16 below = sub(zero(), found.low);
    found.signed_most = where_less(below, found.high, found.high, found.low);
    return found;
}

constexpr int kAtOnce = 2;  // candidates, so that one's sums do not wait for their own last step
constexpr int kSteps = 8;
constexpr float kMostZero = 256.0f;  // float16 holds smaller ones to an eighth of a code

// Codes -8 to 7 and a zero of 8: for each candidate the least squares scale of the rounding that it gives.
SGL_INLINE void try_scales(Fit& best, const f32x16* values, int64_t count, const Extremes& all,
                           const f32x16 (&inverse)[kAtOnce]) {
    f32x16 products[kAtOnce] = {zero(), zero()}, squares[kAtOnce] = {zero(), zero()};
    for (int64_t i = 0; i < count; ++i)
        for (int j = 0; j < kAtOnce; ++j) {
            f32x16 code = clamp(round(mul(values[i], inverse[j])), -8.0f, 7.0f);
            products[j] = fma(values[i], code, products[j]), squares[j] = fma(code, code, squares[j]);
        }
    for (int j = 0; j < kAtOnce; ++j) {
        f32x16 scale = ratio(products[j], squares[j]);
        keep_better(best, {scale, set1(8.0f), sub(all.squares, mul(scale, products[j]))});
    }
}

// Symmetric: the largest magnitude at codes from -6.8 to -8.9, for the lowest code has no counterpart.
SGL_INLINE Fit search_scale(const f32x16* values, int64_t count, const Extremes& all) {
    Fit best{zero(), set1(8.0f), all.squares};
    f32x16 unit = ratio(all.signed_most, mul(all.signed_most, all.signed_most));
    for (int step = 0; step < kSteps; step += kAtOnce) {
        f32x16 inverse[kAtOnce];
        for (int j = 0; j < kAtOnce; ++j) inverse[j] = mul(unit, set1(-6.8f - 0.3f * static_cast<float>(step + j)));
        try_scales(best, values, count, all, inverse);
    }
    return best;
}

// Codes 0 to 15: for each candidate the line through (code, value) of least squares, from the sums of c, c^2, v and c v.
SGL_INLINE void try_lines(Fit& best, const f32x16* values, int64_t count, const Extremes& all,
                          const f32x16 (&inverse)[kAtOnce], const f32x16 (&start)[kAtOnce]) {
    f32x16 codes[kAtOnce] = {zero(), zero()}, squares[kAtOnce] = {zero(), zero()}, products[kAtOnce] = {zero(), zero()};
    for (int64_t i = 0; i < count; ++i)
        for (int j = 0; j < kAtOnce; ++j) {
            f32x16 code = clamp(round(fma(values[i], inverse[j], start[j])), 0.0f, 15.0f);
            codes[j] = add(codes[j], code), squares[j] = fma(code, code, squares[j]);
            products[j] = fma(values[i], code, products[j]);
        }
    f32x16 n = set1(static_cast<float>(count));
    for (int j = 0; j < kAtOnce; ++j) {
        f32x16 spread = sub(mul(n, squares[j]), mul(codes[j], codes[j]));
        f32x16 scale = ratio(sub(mul(n, products[j]), mul(codes[j], all.sum)), spread);
        f32x16 base = div(sub(all.sum, mul(scale, codes[j])), n);
        f32x16 error = sub(sub(all.squares, mul(scale, products[j])), mul(base, all.sum));
        f32x16 zero_code = sub(zero(), ratio(base, scale)), size = max(zero_code, sub(zero(), zero_code));
        error = where_less(size, set1(kMostZero), where_less(zero(), scale, error, set1(3e38f)), set1(3e38f));
        keep_better(best, {scale, zero_code, error});
    }
}

// With a real zero: the range from lowest to highest over 13 to 15.8 codes. A group whose values are one and the same
// has no such line and keeps its symmetric scale.
SGL_INLINE Fit search_line(const f32x16* values, int64_t count, const Extremes& all) {
    Fit best = search_scale(values, count, all);
    f32x16 middle = mul(add(all.low, all.high), set1(0.5f)), range = sub(all.high, all.low);
    for (int step = 0; step < kSteps; step += kAtOnce) {
        f32x16 inverse[kAtOnce], start[kAtOnce];
        for (int j = 0; j < kAtOnce; ++j) {
            inverse[j] = ratio(set1(13.0f + 0.4f * static_cast<float>(step + j)), range);
            start[j] = sub(set1(7.5f), mul(middle, inverse[j]));
        }
        try_lines(best, values, count, all, inverse, start);
    }
    return best;
}

}  // namespace sgl::SGL_ISA::quantized
