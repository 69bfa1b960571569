// Sixteen 32-bit words at a time, as the draw needs them: bits, table look-ups, and lanes that pass a test as a bit mask.
#pragma once

#include "isa.h"

namespace sgl::SGL_ISA {

#if SGL_LEVEL >= 3

SGL_INLINE i32x16 xor_i32(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
SGL_INLINE i32x16 and_i32(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
SGL_INLINE i32x16 or_i32(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
SGL_INLINE i32x16 sub_i32(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
// Zeros move in from the left.
template <int N>
SGL_INLINE i32x16 shift_right(i32x16 a) {
    return {_mm512_srli_epi32(a.v, N)};
}
SGL_INLINE i32x16 bits_of(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
SGL_INLINE i32x16 gather(const int32_t* table, i32x16 index) { return {_mm512_i32gather_epi32(index.v, table, 4)}; }
SGL_INLINE uint32_t nan_lanes(f32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
SGL_INLINE uint32_t lanes_at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
SGL_INLINE uint32_t lanes_at_most(i32x16 a, i32x16 b) { return _mm512_cmple_epi32_mask(a.v, b.v); }
// The lesser of both, b where a is NaN.
SGL_INLINE f32x16 min_or_second(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

#elif SGL_LEVEL == 2

SGL_INLINE i32x16 xor_i32(i32x16 x, i32x16 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
SGL_INLINE i32x16 and_i32(i32x16 x, i32x16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
SGL_INLINE i32x16 or_i32(i32x16 x, i32x16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
SGL_INLINE i32x16 sub_i32(i32x16 x, i32x16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
template <int N>
SGL_INLINE i32x16 shift_right(i32x16 x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
SGL_INLINE i32x16 bits_of(f32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
SGL_INLINE i32x16 gather(const int32_t* table, i32x16 index) {
    return {_mm256_i32gather_epi32(table, index.a, 4), _mm256_i32gather_epi32(table, index.b, 4)};
}
SGL_INLINE uint32_t lanes_set(__m256 x, __m256 y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(x)) | static_cast<uint32_t>(_mm256_movemask_ps(y)) << 8;
}
SGL_INLINE uint32_t nan_lanes(f32x16 x) {
    return lanes_set(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
}
SGL_INLINE uint32_t lanes_at_least(f32x16 x, f32x16 y) {
    return lanes_set(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
SGL_INLINE uint32_t lanes_at_most(i32x16 x, i32x16 y) {
    __m256i a = _mm256_cmpgt_epi32(x.a, y.a), b = _mm256_cmpgt_epi32(x.b, y.b);
    return ~lanes_set(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)) & 0xffff;
}
SGL_INLINE f32x16 min_or_second(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

#else

struct Words {
    int32_t lane[16];
};
struct Numbers {
    float lane[16];
};
SGL_INLINE Words words(i32x16 x) {
    Words out;
    store_i32(out.lane, x);
    return out;
}
SGL_INLINE Numbers numbers(f32x16 x) {
    Numbers out;
    store(out.lane, x);
    return out;
}
#define SGL_WORDS(name, expression)              \
    SGL_INLINE i32x16 name(i32x16 x, i32x16 y) { \
        Words a = words(x), b = words(y);        \
        for (int i = 0; i < 16; ++i) {           \
            int32_t p = a.lane[i], q = b.lane[i]; \
            a.lane[i] = expression;              \
        }                                        \
        return load_i32(a.lane);                 \
    }
SGL_WORDS(xor_i32, p ^ q)
SGL_WORDS(and_i32, p & q)
SGL_WORDS(or_i32, p | q)
SGL_WORDS(sub_i32, static_cast<int32_t>(static_cast<uint32_t>(p) - static_cast<uint32_t>(q)))
#undef SGL_WORDS
template <int N>
SGL_INLINE i32x16 shift_right(i32x16 x) {
    Words a = words(x);
    for (int i = 0; i < 16; ++i) a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) >> N);
    return load_i32(a.lane);
}
SGL_INLINE i32x16 bits_of(f32x16 x) {
    Numbers a = numbers(x);
    Words out;
    std::memcpy(&out, &a, sizeof out);
    return load_i32(out.lane);
}
SGL_INLINE i32x16 gather(const int32_t* table, i32x16 index) {
    Words a = words(index);
    for (int i = 0; i < 16; ++i) a.lane[i] = table[a.lane[i]];
    return load_i32(a.lane);
}
SGL_INLINE uint32_t nan_lanes(f32x16 x) {
    Numbers a = numbers(x);
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.lane[i] != a.lane[i]) << i;
    return mask;
}
SGL_INLINE uint32_t lanes_at_least(f32x16 x, f32x16 y) {
    Numbers a = numbers(x), b = numbers(y);
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.lane[i] >= b.lane[i]) << i;
    return mask;
}
SGL_INLINE uint32_t lanes_at_most(i32x16 x, i32x16 y) {
    Words a = words(x), b = words(y);
    uint32_t mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.lane[i] <= b.lane[i]) << i;
    return mask;
}
SGL_INLINE f32x16 min_or_second(f32x16 x, f32x16 y) {
    Numbers a = numbers(x), b = numbers(y);
    for (int i = 0; i < 16; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return load(a.lane);
}

#endif

}  // namespace sgl::SGL_ISA
