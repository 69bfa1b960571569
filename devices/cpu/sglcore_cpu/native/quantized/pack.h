// Weights to panels.
#pragma once

#include "args.h"
#include "weight.h"

namespace sgl::SGL_ISA::quantized {

// The nearest float16, ties to even; beyond its range, infinity.
SGL_INLINE uint16_t to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) {  // below 2^-14: the float's own addition rounds to units of 2^-24
        float small;
        std::memcpy(&small, &rest, 4);
        small += 0.5f;
        std::memcpy(&rest, &small, 4);
        return static_cast<uint16_t>(sign | (rest - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rest - 0x38000000) >> 13));
}

// Sixteen float16 values as the kernels will read them.
SGL_INLINE f32x16 put_f16(uint16_t* out, f32x16 values) {
    alignas(64) float lanes[16];
    store(lanes, values);
    for (int lane = 0; lane < 16; ++lane) out[lane] = to_f16(lanes[lane]);
    return load_f16(out);
}

// Sixteen rows' codes for the columns of one group, as floats [column][row], to the panel's lines.
SGL_INLINE void put_codes(const Weight& weight, const f32x16* codes, uint8_t* out) {
    auto four = [&](int64_t column) {
        i32x16 word = to_i32(codes[column + 3]);
        for (int i = 2; i >= 0; --i) word = add_i32(mul_i32(word, set1_i32(256)), to_i32(codes[column + i]));
        return word;
    };
    auto* lines = reinterpret_cast<int32_t*>(out);
    if (weight.bits == 8) {
        for (int64_t column = 0; column < weight.group; column += 4, lines += 16) store_i32(lines, four(column));
        return;
    }
    for (int64_t column = 0; column < weight.group; column += 8, lines += 16)
        store_i32(lines, add_i32(four(column), mul_i32(four(column + 4), set1_i32(16))));
}

}  // namespace sgl::SGL_ISA::quantized
