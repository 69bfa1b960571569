// Sixteen lanes on every processor: one vector of AVX-512, two of AVX2, four of NEON. Kernels are written once over these
// types and compiled once per instruction set, each in a namespace of its own.
//
// SGL_ISA is the namespace, SGL_LEVEL what may be used: 1 NEON, 2 AVX2, 3 AVX-512, 4 with VNNI, 5 with BF16, 6 with AMX.
// SGL_EMULATE builds levels 4 to 6 for a processor that has level 3 only: their instructions become plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef SGL_ISA
#error "compile this file with SGL_ISA and SGL_LEVEL"
#endif

#define SGL_INLINE static inline __attribute__((always_inline))

namespace sgl::SGL_ISA {

using bf16 = uint16_t;

SGL_INLINE float from_bf16(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// Round to nearest, ties to even, as torch does; NaN stays NaN.
SGL_INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace sgl::SGL_ISA

#if SGL_LEVEL >= 3
#include "isa_avx512.h"
#elif SGL_LEVEL == 2
#include "isa_avx2.h"
#else
#include "isa_neon.h"
#endif

namespace sgl::SGL_ISA {

// e^x within 2 units in the last place: 2^n * p(r) with r in [-ln2/2, ln2/2], p of degree 6; x is cut to
// [-87.3, 88.3], so the least result is 1.2e-38.
SGL_INLINE f32x16 exp(f32x16 x) {
    x = max(min(x, set1(88.3762626647949f)), set1(-87.3365447504019f));
    f32x16 n = round(mul(x, set1(1.44269504088896341f)));
    f32x16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    f32x16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(p, r), r, r), set1(1.0f));
    return scale_by_power(p, to_i32(n));
}

// x / (1 + e^-x) (Elfwing et al. 2018).
SGL_INLINE f32x16 silu(f32x16 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace sgl::SGL_ISA
