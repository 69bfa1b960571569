#include "activations.h"

namespace sgl::SGL_ISA::quantized {

namespace {

constexpr float kTiny = 1e-30f;               // groups below it are taken as zero: 127 / x must not overflow
constexpr int64_t kSerialElements = 32 * 1024;  // fewer are quantised sooner by one thread than others wake up

struct Group {
    f32x16 values[8];
    int64_t vectors;
};

// The largest magnitude; NaN where a value is not finite.
SGL_INLINE float magnitude(const Group& group) {
    f32x16 largest = zero(), poison = zero();
    for (int64_t i = 0; i < group.vectors; ++i) {
        largest = max(largest, max(group.values[i], sub(zero(), group.values[i])));
        poison = fma(group.values[i], zero(), poison);
    }
    return reduce_max(largest) + reduce_add(poison);
}

// The codes of one group; returns their sum.
SGL_INLINE float encode(const Group& group, float factor, int8_t* out) {
    f32x16 sum = zero();
    for (int64_t i = 0; i < group.vectors; ++i) {
        f32x16 code = round(mul(group.values[i], set1(factor)));
        sum = add(sum, code);
        alignas(64) int32_t lanes[16];
        store_i32(lanes, to_i32(code));
        for (int lane = 0; lane < 16; ++lane) out[16 * i + lane] = static_cast<int8_t>(lanes[lane]);
    }
    return reduce_add(sum);
}

struct Quantizer {
    const void* x;
    int64_t type, stride, columns;
    int32_t middle;
    float multiplier;
    Activations out;

    void token(int64_t index) const {
        const void* row = row_of(x, type, stride, index);
        TileView tile(out, index / out.height, index % out.height);
        for (int64_t at = 0, place = 0; at < out.padded; at += out.group, place += out.height) {
            Group values = load(row, at);
            alignas(64) int8_t codes[128];
            float largest = magnitude(values), sum = 0.0f;
            if (largest >= kTiny) sum = encode(values, 127.0f / largest, codes);
            else std::memset(codes, 0, sizeof(codes));
            float scale = largest >= kTiny || std::isnan(largest) ? largest / 127.0f * multiplier : 0.0f;
            tile.scales[place] = scale;
            tile.sums[place] = sum;
            tile.corrections[place] = -middle * static_cast<int32_t>(sum);
            put(codes, at, tile.codes);
        }
    }

  private:
    Group load(const void* row, int64_t at) const {
        Group group{{}, out.group / 16};
        for (int64_t i = 0; i < group.vectors; ++i, at += 16)
            group.values[i] = load_row(row, type, least(at, columns), most(0, least(16, columns - at)));
        return group;
    }

    void put(const int8_t* codes, int64_t at, int8_t* tile) const {
        for (int64_t done = 0; done < out.group; done += 32) {
            int64_t column = at + done;
            std::memcpy(tile + column / kColumns * out.height * kColumns + column % kColumns, codes + done, 32);
        }
    }
};

// As few tiles as tokens need, as even as can be.
int64_t tile_height(int64_t tokens) { return parts(tokens, parts(tokens, 16)); }

}  // namespace

size_t activation_bytes(const Weight& weight, int64_t tokens) {
    int64_t rows = up_to(tokens, tile_height(tokens));
    return static_cast<size_t>(rows * (weight.padded + 12 * weight.groups()));
}

Activations quantize(const void* x, int64_t type, int64_t stride, int64_t tokens, const Weight& weight,
                     float multiplier, void* memory, Pool& pool) {
    int64_t height = tile_height(tokens), rows = up_to(tokens, height), places = rows * weight.groups();
    auto* codes = static_cast<int8_t*>(memory);
    auto* scales = reinterpret_cast<float*>(codes + rows * weight.padded);
    auto* corrections = reinterpret_cast<int32_t*>(scales + 2 * places);
    Activations out{codes, scales, scales + places, corrections, tokens, height, weight.padded, weight.group};
    Quantizer quantizer{x, type, stride, weight.columns, weight.middle(), multiplier, out};
    auto body = [&](int64_t first, int64_t last, int) {
        for (int64_t token = first; token < last; ++token) quantizer.token(token);
    };
    if (tokens * weight.columns <= kSerialElements) body(0, tokens, 0);
    else pool.run(tokens, most(1, kSerialElements / 4 / weight.columns), body);
    return out;
}

}  // namespace sgl::SGL_ISA::quantized
