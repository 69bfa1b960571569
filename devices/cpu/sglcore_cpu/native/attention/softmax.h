// Exponentials to the base two: scores are multiplied by log2(e) once, so that a probability is one power of two.
#pragma once

#include "isa.h"

namespace sgl::SGL_ISA {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLowest = -1e30f;  // less than any score, and its differences are finite

// 2^x for x <= 0 within 1.5 units in the last place, exactly 0 below -100 (so that nothing masked or negligible brings
// denormal products) and exactly 1 at 0. NaN stays NaN. A minimax polynomial of degree 5 on [-1/2, 1/2].
SGL_INLINE f32x16 power_of_two(f32x16 x) {
    constexpr float least = 7.88860905e-31f;  // 2^-100
    x = max(set1(-100.0f), x);
    f32x16 n = round(x), r = sub(x, n);
    f32x16 p = set1(0.001326472032815218f);
    p = fma(p, r, set1(0.009671512991189957f));
    p = fma(p, r, set1(0.05550733581185341f));
    p = fma(p, r, set1(0.24022242426872253f));
    p = fma(p, r, set1(0.6931470036506653f));
    p = fma(p, r, set1(1.0f));
    return sub(scale_by_power(p, to_i32(n)), set1(least));
}

inline float power_of_two(float x) {
    alignas(64) float lanes[16];
    store(lanes, power_of_two(set1(x)));
    return lanes[0];
}

}  // namespace sgl::SGL_ISA
