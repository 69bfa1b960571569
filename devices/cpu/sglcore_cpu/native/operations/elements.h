// Rows of float32 or bf16 as sixteen lanes of float32, and when several threads are worth their waking.
#pragma once

#include "isa.h"
#include "kernels.h"

namespace sgl::SGL_ISA {

SGL_INLINE f32x16 load16(const float* p) { return load(p); }
SGL_INLINE f32x16 load16(const bf16* p) { return load_bf16(p); }
SGL_INLINE void store16(float* p, f32x16 x) { store(p, x); }
SGL_INLINE void store16(bf16* p, f32x16 x) { store_bf16(p, x); }

// The first n lanes, all sixteen for n >= 16; nothing beyond is touched.
SGL_INLINE f32x16 get(const float* p, int64_t n) { return n >= 16 ? load(p) : load_first(p, n); }
SGL_INLINE f32x16 get(const bf16* p, int64_t n) { return n >= 16 ? load_bf16(p) : load_bf16_first(p, n); }
SGL_INLINE void put(float* p, f32x16 x, int64_t n) { n >= 16 ? store(p, x) : store_first(p, x, n); }
SGL_INLINE void put(bf16* p, f32x16 x, int64_t n) { n >= 16 ? store_bf16(p, x) : store_bf16_first(p, x, n); }

// The value after a round trip through bf16 without the trip, which costs several times the arithmetic around it.
#if SGL_LEVEL >= 3
SGL_INLINE f32x16 as_bf16(f32x16 x) {
    __m512i bits = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    even = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
    return {_mm512_castsi512_ps(_mm512_and_si512(even, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
}
#elif SGL_LEVEL == 2
SGL_INLINE __m256 half_as_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    even = _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm256_castsi256_ps(_mm256_and_si256(even, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}
SGL_INLINE f32x16 as_bf16(f32x16 x) { return {half_as_bf16(x.a), half_as_bf16(x.b)}; }
#else
SGL_INLINE f32x16 as_bf16(f32x16 x) { return rounded(x); }
#endif

// What is left of the value in memory of type T.
template <class T>
SGL_INLINE f32x16 cast(f32x16 x) {
    if constexpr (sizeof(T) == 2) return as_bf16(x);
    return x;
}

// Rows of one part: fewer elements than this take less time than a second thread's waking.
constexpr int64_t kWorthWaking = 16384;
SGL_INLINE int64_t rows_of_part(int64_t width) { return width >= kWorthWaking ? 1 : kWorthWaking / (width + 1) + 1; }

// body(row, thread) for every row, by several threads where that is worth it.
template <class Body>
void each_row(Pool& pool, int64_t rows, int64_t width, Body&& body) {
    pool.run(rows, rows_of_part(width), [&](int64_t first, int64_t last, int thread) {
        for (int64_t row = first; row < last; ++row) body(row, thread);
    });
}

// An index of 4 or 8 bytes.
SGL_INLINE int64_t index_at(const void* indices, int64_t bytes, int64_t i) {
    return bytes == 4 ? static_cast<const int32_t*>(indices)[i] : static_cast<const int64_t*>(indices)[i];
}

// call(T{}) with the element type that an argument names.
template <class Call>
void with_type(int64_t type, Call&& call) {
    if (type == kBF16) return call(bf16{});
    call(float{});
}

template <class T>
const T* row_of(const void* data, int64_t row, int64_t stride) {
    return static_cast<const T*>(data) + row * stride;
}
template <class T>
T* row_of(void* data, int64_t row, int64_t stride) {
    return static_cast<T*>(data) + row * stride;
}

}  // namespace sgl::SGL_ISA
