// The sixteen lanes as two registers of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace sgl::SGL_ISA {

struct f32x16 {
    __m256 a, b;
};
struct i32x16 {
    __m256i a, b;
};

SGL_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SGL_INLINE f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SGL_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SGL_INLINE void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
// The first n lanes (0 <= n <= 16); the others are 0 and nothing beyond them is touched.
SGL_INLINE f32x16 load_first(const float* p, int64_t n) {
    alignas(32) float lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * 4);
    return load(lanes);
}
SGL_INLINE void store_first(float* p, f32x16 x, int64_t n) {
    alignas(32) float lanes[16];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 4);
}

#define SGL_TWICE(name, intrinsic) \
    SGL_INLINE f32x16 name(f32x16 x, f32x16 y) { return {intrinsic(x.a, y.a), intrinsic(x.b, y.b)}; }
SGL_TWICE(add, _mm256_add_ps)
SGL_TWICE(sub, _mm256_sub_ps)
SGL_TWICE(mul, _mm256_mul_ps)
SGL_TWICE(div, _mm256_div_ps)
SGL_TWICE(max, _mm256_max_ps)
SGL_TWICE(min, _mm256_min_ps)
#undef SGL_TWICE
SGL_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
SGL_INLINE f32x16 round(f32x16 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
SGL_INLINE float reduce_add(f32x16 x) {
    __m256 sum = _mm256_add_ps(x.a, x.b);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
// The sums of four, side by side.
SGL_INLINE void reduce_add4(float* out, f32x16 x, f32x16 y, f32x16 z, f32x16 w) {
    __m256 xy = _mm256_hadd_ps(_mm256_add_ps(x.a, x.b), _mm256_add_ps(y.a, y.b));
    __m256 zw = _mm256_hadd_ps(_mm256_add_ps(z.a, z.b), _mm256_add_ps(w.a, w.b));
    __m256 all = _mm256_hadd_ps(xy, zw);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
SGL_INLINE float reduce_max(f32x16 x) {
    __m256 most = _mm256_max_ps(x.a, x.b);
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

SGL_INLINE i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
SGL_INLINE i32x16 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SGL_INLINE i32x16 load_i32(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
SGL_INLINE void store_i32(int32_t* p, i32x16 x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
SGL_INLINE i32x16 add_i32(i32x16 x, i32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
SGL_INLINE i32x16 mul_i32(i32x16 x, i32x16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
SGL_INLINE i32x16 to_i32(f32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
SGL_INLINE f32x16 to_f32(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
SGL_INLINE __m256 power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// x * 2^n for n in [-126, 127].
SGL_INLINE f32x16 scale_by_power(f32x16 x, i32x16 n) {
    return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}

SGL_INLINE __m256 widen(__m128i narrow) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}
SGL_INLINE f32x16 load_bf16(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// The nearest bf16, ties to even, as the high half of each lane; NaN stays NaN.
SGL_INLINE __m256i nearest_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
SGL_INLINE __m256i narrow_half(__m256 x) { return _mm256_srli_epi32(nearest_bf16(x), 16); }
SGL_INLINE __m256 rounded_half(__m256 x) {
    __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(x), high));
}
// The value after a round trip through bf16: where the reference casts, kernels cast too.
SGL_INLINE f32x16 rounded(f32x16 x) { return {rounded_half(x.a), rounded_half(x.b)}; }
SGL_INLINE void store_bf16(bf16* p, f32x16 x) {
    __m256i mixed = _mm256_packus_epi32(narrow_half(x.a), narrow_half(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
SGL_INLINE f32x16 load_bf16_first(const bf16* p, int64_t n) {
    alignas(32) bf16 lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * 2);
    return load_bf16(lanes);
}
SGL_INLINE void store_bf16_first(bf16* p, f32x16 x, int64_t n) {
    alignas(32) bf16 lanes[16];
    store_bf16(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
}
SGL_INLINE f32x16 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

// Sixteen signed bytes, widened.
SGL_INLINE f32x16 load_i8(const int8_t* p) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    __m128i later = _mm_srli_si128(bytes, 8);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(later))};
}
SGL_INLINE f32x16 load_i8_first(const int8_t* p, int64_t n) {
    alignas(16) int8_t lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_i8(lanes);
}

// 64 bytes of a weight panel: sixteen pairs of bf16, or sixteen groups of four bytes.
struct line {
    __m256i a, b;
};
SGL_INLINE line load_line(const void* p) {
    const auto* halves = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
SGL_INLINE void store_line(void* p, line x) {
    auto* halves = static_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, x.a);
    _mm256_storeu_si256(halves + 1, x.b);
}
// The first n bytes (0 <= n <= 64); the others are 0 and nothing beyond them is touched.
SGL_INLINE line load_line_first(const void* p, int64_t n) {
    alignas(32) char bytes[64] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return load_line(bytes);
}
SGL_INLINE line broadcast4(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
}
// The low and the high nibble of every byte.
SGL_INLINE line low_nibbles(line x) {
    __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
SGL_INLINE line high_nibbles(line x) {
    __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// The first and the second bf16 of every pair, widened.
SGL_INLINE f32x16 pair_first(line x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
SGL_INLINE f32x16 pair_second(line x) {
    __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}

// acc + a0 * b0 + a1 * b1 for the bf16 pairs of each lane.
SGL_INLINE f32x16 dot_bf16(f32x16 acc, line x, line y) {
    return fma(pair_second(x), pair_second(y), fma(pair_first(x), pair_first(y), acc));
}

SGL_INLINE __m256i dot_half(__m256i acc, __m256i x, __m256i y) {
    // Even and odd bytes apart, so that no 16-bit sum saturates.
    __m256i even = _mm256_madd_epi16(
        _mm256_and_si256(x, _mm256_set1_epi16(0x00ff)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// acc + the sum of four products of unsigned bytes of x and signed bytes of y, for each lane.
SGL_INLINE i32x16 dot_u8s8(i32x16 acc, line x, line y) {
    return {dot_half(acc.a, x.a, y.a), dot_half(acc.b, x.b, y.b)};
}

SGL_INLINE __m256i dot_half_u4(__m256i acc, __m256i x, __m256i y) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
// The same where no byte of x is above 15: then 16-bit sums hold.
SGL_INLINE i32x16 dot_u4s8(i32x16 acc, line x, line y) {
    return {dot_half_u4(acc.a, x.a, y.a), dot_half_u4(acc.b, x.b, y.b)};
}

SGL_INLINE __m256 half_where_less(__m256 a, __m256 b, __m256 yes, __m256 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// yes where a < b, else no, lane by lane; no where either is NaN.
SGL_INLINE f32x16 where_less(f32x16 a, f32x16 b, f32x16 yes, f32x16 no) {
    return {half_where_less(a.a, b.a, yes.a, no.a), half_where_less(a.b, b.b, yes.b, no.b)};
}

}  // namespace sgl::SGL_ISA
