// The sixteen lanes as four registers of NEON, with the bf16, i8mm and fp16 extensions (Armv8.6; optional from 8.2).
#pragma once

#include <arm_neon.h>

namespace sgl::SGL_ISA {

struct f32x16 {
    float32x4_t a, b, c, d;
};
struct i32x16 {
    int32x4_t a, b, c, d;
};

SGL_INLINE f32x16 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
SGL_INLINE f32x16 zero() { return set1(0.0f); }
SGL_INLINE f32x16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
SGL_INLINE void store(float* p, f32x16 x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
// The first n lanes (0 <= n <= 16); the others are 0 and nothing beyond them is touched.
SGL_INLINE f32x16 load_first(const float* p, int64_t n) {
    alignas(64) float lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * 4);
    return load(lanes);
}
SGL_INLINE void store_first(float* p, f32x16 x, int64_t n) {
    alignas(64) float lanes[16];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 4);
}

// The second where either is NaN, as the other processors' instructions have it.
SGL_INLINE float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
SGL_INLINE float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

#define SGL_EACH(Type, name, intrinsic)      \
    SGL_INLINE Type name(Type x, Type y) {   \
        return {intrinsic(x.a, y.a), intrinsic(x.b, y.b), intrinsic(x.c, y.c), intrinsic(x.d, y.d)}; \
    }
SGL_EACH(f32x16, add, vaddq_f32)
SGL_EACH(f32x16, sub, vsubq_f32)
SGL_EACH(f32x16, mul, vmulq_f32)
SGL_EACH(f32x16, div, vdivq_f32)
SGL_EACH(f32x16, max, greater)
SGL_EACH(f32x16, min, lesser)
SGL_EACH(i32x16, add_i32, vaddq_s32)
SGL_EACH(i32x16, mul_i32, vmulq_s32)
#undef SGL_EACH
SGL_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
SGL_INLINE f32x16 round(f32x16 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }
SGL_INLINE float reduce_add(f32x16 x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
// The sums of four, side by side.
SGL_INLINE void reduce_add4(float* out, f32x16 x, f32x16 y, f32x16 z, f32x16 w) {
    auto quarter = [](f32x16 q) { return vaddq_f32(vaddq_f32(q.a, q.b), vaddq_f32(q.c, q.d)); };
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(quarter(x), quarter(y)), vpaddq_f32(quarter(z), quarter(w))));
}
SGL_INLINE float reduce_max(f32x16 x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d)));
}

SGL_INLINE i32x16 set1_i32(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
SGL_INLINE i32x16 zero_i32() { return set1_i32(0); }
SGL_INLINE i32x16 load_i32(const int32_t* p) {
    return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)};
}
SGL_INLINE void store_i32(int32_t* p, i32x16 x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
// To the nearest, ties to even.
SGL_INLINE i32x16 to_i32(f32x16 x) {
    return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)};
}
SGL_INLINE f32x16 to_f32(i32x16 x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
SGL_INLINE float32x4_t power(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
// x * 2^n for n in [-126, 127].
SGL_INLINE f32x16 scale_by_power(f32x16 x, i32x16 n) {
    return mul(x, {power(n.a), power(n.b), power(n.c), power(n.d)});
}

SGL_INLINE float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
SGL_INLINE f32x16 load_bf16(const bf16* p) {
    return {widen(vld1_u16(p)), widen(vld1_u16(p + 4)), widen(vld1_u16(p + 8)), widen(vld1_u16(p + 12))};
}
SGL_INLINE uint16x8_t narrow(float32x4_t low, float32x4_t high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
// The value after a round trip through bf16: where the reference casts, kernels cast too.
SGL_INLINE f32x16 rounded(f32x16 x) {
    uint16x8_t low = narrow(x.a, x.b), high = narrow(x.c, x.d);
    return {widen(vget_low_u16(low)), widen(vget_high_u16(low)), widen(vget_low_u16(high)), widen(vget_high_u16(high))};
}
SGL_INLINE void store_bf16(bf16* p, f32x16 x) {
    vst1q_u16(p, narrow(x.a, x.b));
    vst1q_u16(p + 8, narrow(x.c, x.d));
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
SGL_INLINE float32x4_t widen_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
SGL_INLINE f32x16 load_f16(const uint16_t* p) {
    return {widen_f16(p), widen_f16(p + 4), widen_f16(p + 8), widen_f16(p + 12)};
}

// Sixteen signed bytes, widened.
SGL_INLINE f32x16 load_i8(const int8_t* p) {
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
SGL_INLINE f32x16 load_i8_first(const int8_t* p, int64_t n) {
    alignas(16) int8_t lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_i8(lanes);
}

// 64 bytes of a weight panel: sixteen pairs of bf16, or sixteen groups of four bytes.
struct line {
    uint8x16_t a, b, c, d;
};
SGL_INLINE line load_line(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)};
}
SGL_INLINE void store_line(void* p, line x) {
    auto* bytes = static_cast<uint8_t*>(p);
    vst1q_u8(bytes, x.a);
    vst1q_u8(bytes + 16, x.b);
    vst1q_u8(bytes + 32, x.c);
    vst1q_u8(bytes + 48, x.d);
}
// The first n bytes (0 <= n <= 64); the others are 0 and nothing beyond them is touched.
SGL_INLINE line load_line_first(const void* p, int64_t n) {
    alignas(64) char bytes[64] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return load_line(bytes);
}
SGL_INLINE line broadcast4(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(word));
    return {all, all, all, all};
}
// The low and the high nibble of every byte.
SGL_INLINE line low_nibbles(line x) {
    uint8x16_t mask = vdupq_n_u8(0x0f);
    return {vandq_u8(x.a, mask), vandq_u8(x.b, mask), vandq_u8(x.c, mask), vandq_u8(x.d, mask)};
}
SGL_INLINE line high_nibbles(line x) {
    return {vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4), vshrq_n_u8(x.c, 4), vshrq_n_u8(x.d, 4)};
}
SGL_INLINE float32x4_t low_half(uint8x16_t x) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 16));
}
SGL_INLINE float32x4_t high_half(uint8x16_t x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x), vdupq_n_u32(0xffff0000u)));
}
// The first and the second bf16 of every pair, widened.
SGL_INLINE f32x16 pair_first(line x) { return {low_half(x.a), low_half(x.b), low_half(x.c), low_half(x.d)}; }
SGL_INLINE f32x16 pair_second(line x) { return {high_half(x.a), high_half(x.b), high_half(x.c), high_half(x.d)}; }

SGL_INLINE float32x4_t dot_pairs(float32x4_t acc, uint8x16_t x, uint8x16_t y) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_u8(x), vreinterpretq_bf16_u8(y));
}
// acc + x0 * y0 + x1 * y1 for the bf16 pairs of each lane. The processor may round the two products' sum before it is
// added, and may take denormal numbers for zeros.
SGL_INLINE f32x16 dot_bf16(f32x16 acc, line x, line y) {
    return {
        dot_pairs(acc.a, x.a, y.a), dot_pairs(acc.b, x.b, y.b), dot_pairs(acc.c, x.c, y.c), dot_pairs(acc.d, x.d, y.d)};
}

SGL_INLINE int32x4_t dot_bytes(int32x4_t acc, uint8x16_t x, uint8x16_t y) {
    return vusdotq_s32(acc, x, vreinterpretq_s8_u8(y));
}
// acc + the sum of four products of unsigned bytes of x and signed bytes of y, for each lane.
SGL_INLINE i32x16 dot_u8s8(i32x16 acc, line x, line y) {
    return {
        dot_bytes(acc.a, x.a, y.a), dot_bytes(acc.b, x.b, y.b), dot_bytes(acc.c, x.c, y.c), dot_bytes(acc.d, x.d, y.d)};
}
// The same where no byte of x is above 15.
SGL_INLINE i32x16 dot_u4s8(i32x16 acc, line x, line y) { return dot_u8s8(acc, x, y); }

SGL_INLINE float32x4_t choose_less(float32x4_t x, float32x4_t y, float32x4_t yes, float32x4_t no) {
    return vbslq_f32(vcltq_f32(x, y), yes, no);
}
// yes where x < y, else no, lane by lane; no where either is NaN.
SGL_INLINE f32x16 where_less(f32x16 x, f32x16 y, f32x16 yes, f32x16 no) {
    return {choose_less(x.a, y.a, yes.a, no.a), choose_less(x.b, y.b, yes.b, no.b), choose_less(x.c, y.c, yes.c, no.c),
            choose_less(x.d, y.d, yes.d, no.d)};
}

}  // namespace sgl::SGL_ISA
