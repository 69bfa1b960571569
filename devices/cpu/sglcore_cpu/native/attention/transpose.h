// Squares of 16 x 16 words of four bytes.
#pragma once

#include "isa.h"

namespace sgl::SGL_ISA {

#if SGL_LEVEL >= 3

// to[j][i] = from[i][j]; strides in words.
inline void transpose(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
    __m512i x[16], y[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // x[i + j]: column j of each quarter, of rows i to i + 3
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
        __m512i low_even = _mm512_shuffle_i32x4(x[j], x[j + 4], 0x88);
        __m512i low_odd = _mm512_shuffle_i32x4(x[j], x[j + 4], 0xdd);
        __m512i high_even = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0x88);
        __m512i high_odd = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0xdd);
        _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(low_even, high_even, 0x88));
        _mm512_storeu_si512(to + (j + 4) * to_stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_storeu_si512(to + (j + 8) * to_stride, _mm512_shuffle_i32x4(low_even, high_even, 0xdd));
        _mm512_storeu_si512(to + (j + 12) * to_stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
}

#else

// to[j][i] = from[i][j]; strides in words.
inline void transpose(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
    for (int j = 0; j < 16; ++j)
        for (int i = 0; i < 16; ++i) std::memcpy(to + j * to_stride + i, from + i * from_stride + j, 4);
}

#endif

}  // namespace sgl::SGL_ISA
