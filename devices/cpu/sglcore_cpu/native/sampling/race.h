// The integers of the race, to the bit those of sglcore/sampling: keys, hashes, noise, gaps and weights.
//
// Gaps and noise are counted in 2^-16 nat, weights in 2^-30.
#pragma once

#include "words.h"

namespace sgl::SGL_ISA {

constexpr int32_t kLimit = 32 << 16;  // a token whose gap reaches this is no candidate
constexpr uint32_t kMix1 = 0x7feb352d, kMix2 = 0x846ca68b, kPositionFactor = 0x9e3779b1;
constexpr int kGumbelSize = 1 << 14, kInterpolationBits = 15;
constexpr int kWeightSize = (kLimit >> 8) + 1, kWeightStepBits = 8;
constexpr int kTopPBits = 24;

SGL_INLINE uint32_t mix32(uint32_t x) {
    x = (x ^ x >> 16) * kMix1;
    x = (x ^ x >> 15) * kMix2;
    return x ^ x >> 16;
}

// The key words of one draw; the second multiplies, so it is odd.
struct Key {
    uint32_t first, second;

    Key(const int32_t* seed_words, int32_t position) {
        first = mix32(static_cast<uint32_t>(position) * kPositionFactor + static_cast<uint32_t>(seed_words[0]));
        second = mix32(static_cast<uint32_t>(seed_words[1]) + first) | 1;
    }

    uint32_t hash(int32_t hashed_id) const {
        uint32_t x = static_cast<uint32_t>(hashed_id) ^ first;
        x = (x ^ x >> 16) * second;
        x = (x ^ x >> 15) * kMix2;
        return (x ^ x >> 16) | 1;
    }
    i32x16 hash(i32x16 hashed_ids) const {
        i32x16 x = xor_i32(hashed_ids, set1_i32(static_cast<int32_t>(first)));
        x = mul_i32(xor_i32(x, shift_right<16>(x)), set1_i32(static_cast<int32_t>(second)));
        x = mul_i32(xor_i32(x, shift_right<15>(x)), set1_i32(static_cast<int32_t>(kMix2)));
        return or_i32(xor_i32(x, shift_right<16>(x)), set1_i32(1));
    }
};

// Gumbel noise of a hash: as a signed number the word counts from the nearer end of (0, 1), and exponent and mantissa of
// that number as a float are the index of the table.
SGL_INLINE int32_t noise_of(uint32_t word, const int32_t* gumbel) {
    auto end = static_cast<float>(static_cast<int32_t>(word));
    if (end < 0) end *= -0x1p-32f;
    int32_t bits;
    std::memcpy(&bits, &end, 4);
    int32_t index = (bits >> kInterpolationBits) & (kGumbelSize - 1);
    int32_t step = gumbel[kGumbelSize + index] * (bits & ((1 << kInterpolationBits) - 1));
    return gumbel[index] + (step >> kInterpolationBits);
}

// A little more than the noise of hashes, from their distance m to 2^32: -log(-log(1 - t)) <= -log(t) for t = m / 2^32,
// and log2 of a float is at least its exponent plus its fraction. Halved, m is a positive word.
SGL_INLINE f32x16 noise_bound(i32x16 words) {
    constexpr float unit = 45426.09375f;  // ln 2, rounded up
    constexpr float slack = 8.0f;         // roundings here, and those of the table
    i32x16 half = shift_right<1>(sub_i32(zero_i32(), words));
    f32x16 log2_scaled = to_f32(bits_of(to_f32(half)));
    return fma(log2_scaled, set1(-unit / 8388608.0f), set1((31.0f + 127.0f) * unit + slack));
}

// round((best - x) * scale), at most kLimit: each operation rounds once.
SGL_INLINE int32_t gap_of(float x, float best, float scale) {
    float gap = (best - x) * scale;
    return gap < static_cast<float>(kLimit) ? static_cast<int32_t>(std::nearbyint(gap)) : kLimit;
}
SGL_INLINE i32x16 gaps_of(f32x16 x, float best, float scale) {
    return to_i32(min_or_second(mul(sub(set1(best), x), set1(scale)), set1(static_cast<float>(kLimit))));
}

// exp(-gap).
SGL_INLINE int32_t weight_of(int32_t gap, const int32_t* weight) {
    int32_t index = gap >> kWeightStepBits, rest = gap & ((1 << kWeightStepBits) - 1);
    return weight[index] - ((weight[kWeightSize + index] * rest) >> kWeightStepBits);
}
SGL_INLINE i32x16 weights_of(i32x16 gaps, const int32_t* weight) {
    i32x16 index = shift_right<kWeightStepBits>(gaps);
    i32x16 rest = and_i32(gaps, set1_i32((1 << kWeightStepBits) - 1));
    i32x16 drop = mul_i32(gather(weight + kWeightSize, index), rest);
    return sub_i32(gather(weight, index), shift_right<kWeightStepBits>(drop));
}

}  // namespace sgl::SGL_ISA
