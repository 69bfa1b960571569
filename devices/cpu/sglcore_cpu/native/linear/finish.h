// What becomes of a sum: bias, gate, the casts of the reference, and its place in the result.
#pragma once

#include "isa.h"
#include "linear.h"

namespace sgl::SGL_ISA {

struct Finish {
    char* out;
    int64_t out_stride, out_type, out_features;
    bool rounds;       // the model computes in bf16
    const char* bias;  // of the model's type, or null

    // Sixteen columns of a token, those of panel `panel`.
    void put(int64_t token, int64_t panel, f32x16 value) const {
        write(token, panel, bias == nullptr ? value : add(value, bias_of(panel)));
    }

    void put_gated(int64_t token, int64_t panel, f32x16 gate, f32x16 up) const {
        if (!rounds) return write(token, panel, mul(silu(gate), up));
        write(token, panel, mul(rounded(silu(rounded(gate))), rounded(up)));
    }

  private:
    int64_t lanes(int64_t panel) const {
        int64_t left = out_features - panel * 16;
        return left < 16 ? left : 16;
    }

    f32x16 bias_of(int64_t panel) const {
        if (rounds) return load_bf16_first(reinterpret_cast<const bf16*>(bias) + panel * 16, lanes(panel));
        return load_first(reinterpret_cast<const float*>(bias) + panel * 16, lanes(panel));
    }

    // Columns past the last are left alone.
    void write(int64_t token, int64_t panel, f32x16 value) const {
        int64_t count = lanes(panel), place = token * out_stride + panel * 16;
        if (out_type == kBF16) {
            bf16* to = reinterpret_cast<bf16*>(out) + place;
            return count == 16 ? store_bf16(to, value) : store_bf16_first(to, value, count);
        }
        if (rounds) value = rounded(value);
        float* to = reinterpret_cast<float*>(out) + place;
        return count == 16 ? store(to, value) : store_first(to, value, count);
    }
};

}  // namespace sgl::SGL_ISA
