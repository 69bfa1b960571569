// The sums of sixteen vectors as one vector.
#pragma once

#include "isa.h"

namespace sgl::SGL_ISA {

#if SGL_LEVEL >= 3

// Where the vector must lie whose sum is to become lane `lane`.
constexpr int kPlaceOfSum[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

SGL_INLINE f32x16 sixteen_sums(const f32x16* x) {
    __m512 half[8], quarter[4], pair[2];
    for (int i = 0; i < 8; ++i) {
        __m512 kept = _mm512_mask_blend_ps(0xff00, x[i].v, x[i + 8].v);
        half[i] = _mm512_add_ps(kept, _mm512_shuffle_f32x4(x[i].v, x[i + 8].v, 0x4e));
    }
    for (int i = 0; i < 4; ++i)
        quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88),
                                   _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i) {
        __m512d a = _mm512_castps_pd(quarter[i]), b = _mm512_castps_pd(quarter[i + 2]);
        pair[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    return {_mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xdd))};
}

#else

constexpr int kPlaceOfSum[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#if SGL_LEVEL == 2

SGL_INLINE __m256 eight_sums(const f32x16* x) {
    __m256 pair[4];
    for (int i = 0; i < 4; ++i)
        pair[i] = _mm256_hadd_ps(_mm256_add_ps(x[2 * i].a, x[2 * i].b), _mm256_add_ps(x[2 * i + 1].a, x[2 * i + 1].b));
    __m256 low = _mm256_hadd_ps(pair[0], pair[1]), high = _mm256_hadd_ps(pair[2], pair[3]);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
SGL_INLINE f32x16 sixteen_sums(const f32x16* x) { return {eight_sums(x), eight_sums(x + 8)}; }

#else

SGL_INLINE f32x16 sixteen_sums(const f32x16* x) {
    float sums[16];
    for (int i = 0; i < 16; ++i) sums[i] = reduce_add(x[i]);
    return load(sums);
}

#endif
#endif

}  // namespace sgl::SGL_ISA
