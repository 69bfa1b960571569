// The sixteen lanes as one register of AVX-512 (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

namespace sgl::SGL_ISA {

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};

SGL_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
SGL_INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
SGL_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SGL_INLINE void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
SGL_INLINE __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1); }
// The first n lanes (0 <= n <= 16); the others are 0 and nothing beyond them is touched.
SGL_INLINE f32x16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
SGL_INLINE void store_first(float* p, f32x16 x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }

SGL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SGL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SGL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SGL_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SGL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
SGL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SGL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SGL_INLINE f32x16 round(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
SGL_INLINE float reduce_add(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
// The sums of four, side by side.
SGL_INLINE void reduce_add4(float* out, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
SGL_INLINE float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

SGL_INLINE i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
SGL_INLINE i32x16 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
SGL_INLINE i32x16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
SGL_INLINE void store_i32(int32_t* p, i32x16 x) { _mm512_storeu_si512(p, x.v); }
SGL_INLINE i32x16 add_i32(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
SGL_INLINE i32x16 mul_i32(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
SGL_INLINE i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
SGL_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// x * 2^n for n in [-126, 127].
SGL_INLINE f32x16 scale_by_power(f32x16 x, i32x16 n) {
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(bits))};
}

SGL_INLINE f32x16 load_bf16(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// The nearest bf16, ties to even, as the high half of each lane; NaN stays NaN.
SGL_INLINE __m512i nearest_bf16(f32x16 x) {
    __m512i bits = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
}
SGL_INLINE __m256i narrow_bf16(f32x16 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_bf16(x), 16)); }
// The value after a round trip through bf16: where the reference casts, kernels cast too.
SGL_INLINE f32x16 rounded(f32x16 x) {
    __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(nearest_bf16(x), high))};
}
SGL_INLINE void store_bf16(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(x)); }
SGL_INLINE f32x16 load_bf16_first(const bf16* p, int64_t n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16))};
}
SGL_INLINE void store_bf16_first(bf16* p, f32x16 x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(x)); }
SGL_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

// Sixteen signed bytes, widened.
SGL_INLINE f32x16 load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
SGL_INLINE f32x16 load_i8_first(const int8_t* p, int64_t n) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)))};
}

// 64 bytes of a weight panel: sixteen pairs of bf16, or sixteen groups of four bytes.
struct line {
    __m512i v;
};
SGL_INLINE line load_line(const void* p) { return {_mm512_loadu_si512(p)}; }
SGL_INLINE void store_line(void* p, line x) { _mm512_storeu_si512(p, x.v); }
// The first n bytes (0 <= n <= 64); the others are 0 and nothing beyond them is touched.
SGL_INLINE line load_line_first(const void* p, int64_t n) {
    return {_mm512_maskz_loadu_epi8(n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1, p)};
}
SGL_INLINE line broadcast4(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
// The low and the high nibble of every byte.
SGL_INLINE line low_nibbles(line x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(0x0f))}; }
SGL_INLINE line high_nibbles(line x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(0x0f))}; }
// The first and the second bf16 of every pair, widened.
SGL_INLINE f32x16 pair_first(line x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
SGL_INLINE f32x16 pair_second(line x) {
    return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
}

// acc + a0 * b0 + a1 * b1 for the bf16 pairs of each lane.
SGL_INLINE f32x16 dot_bf16(f32x16 acc, line a, line b) {
#if SGL_LEVEL >= 5 && !defined(SGL_EMULATE)
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
    return fma(pair_second(a), pair_second(b), fma(pair_first(a), pair_first(b), acc));
#endif
}

// acc + the sum of four products of unsigned bytes of a and signed bytes of b, for each lane.
SGL_INLINE i32x16 dot_u8s8(i32x16 acc, line a, line b) {
#if SGL_LEVEL >= 4 && !defined(SGL_EMULATE)
    return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
    // Even and odd bytes apart, so that no 16-bit sum saturates.
    __m512i low = _mm512_set1_epi16(0x00ff);
    __m512i a_even = _mm512_and_si512(a.v, low), a_odd = _mm512_srli_epi16(a.v, 8);
    __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8), b_odd = _mm512_srai_epi16(b.v, 8);
    __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(a_even, b_even), _mm512_madd_epi16(a_odd, b_odd));
    return {_mm512_add_epi32(acc.v, sum)};
#endif
}

// The same where no byte of a is above 15: then 16-bit sums hold.
SGL_INLINE i32x16 dot_u4s8(i32x16 acc, line a, line b) {
#if SGL_LEVEL >= 4 && !defined(SGL_EMULATE)
    return dot_u8s8(acc, a, b);
#else
    __m512i pairs = _mm512_maddubs_epi16(a.v, b.v);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

// yes where a < b, else no, lane by lane; no where either is NaN.
SGL_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

}  // namespace sgl::SGL_ISA
