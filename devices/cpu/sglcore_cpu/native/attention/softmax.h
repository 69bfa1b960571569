// Exponentials to the base two: scores are multiplied by log2(e) once, so that a probability is one power of two.
#pragma once

#include "attention.h"
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

// tanh x within 3 units in the last place; NaN stays NaN. Below 5/8 the odd polynomial of Cephes (Moshier 1989).
SGL_INLINE f32x16 tanh(f32x16 x) {
    f32x16 square = mul(x, x), p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    f32x16 near = fma(mul(p, square), x, x);
    f32x16 far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
    return where_less(set1(0.390625f), square, far, near);
}

// Scores that are not scaled yet, so that scaled they are softcap * tanh(s / softcap); `count` is a multiple of 16.
inline void cap(float* scores, int64_t count, double scaling, double softcap) {
    f32x16 inside = set1(static_cast<float>(scaling / softcap)), outside = set1(static_cast<float>(softcap / scaling));
    for (int64_t i = 0; i < count; i += 16) store(scores + i, mul(outside, tanh(mul(inside, load(scores + i)))));
}

// To the base two; where there are no sinks, one that weighs nothing beside any score.
template <class Args>
inline float sink(const Args& args, int64_t head) {
    if (args.sinks == nullptr) return kLowest;
    return kLog2E * (args.sinks_type == kF32 ? static_cast<const float*>(args.sinks)[head]
                                             : from_bf16(static_cast<const bf16*>(args.sinks)[head]));
}

}  // namespace sgl::SGL_ISA
