// Where a quantised weight's codes, scales and zeros lie.
#pragma once

#include "isa.h"
#include "kernels.h"

namespace sgl::SGL_ISA::quantized {

constexpr int64_t kPanel = 16;   // rows of a panel
constexpr int64_t kColumns = 64;  // columns come in multiples of it: one tile of bytes

SGL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SGL_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
SGL_INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }
SGL_INLINE int64_t up_to(int64_t count, int64_t size) { return parts(count, size) * size; }

struct Weight {
    uint8_t* codes;
    uint16_t* scales;
    uint16_t* zeros;
    int64_t bits, group, rows, columns, padded;

    template <class Args>
    explicit Weight(const Args& args)
        : codes(static_cast<uint8_t*>(args.codes)),
          scales(static_cast<uint16_t*>(args.scales)),
          zeros(static_cast<uint16_t*>(args.zeros)),
          bits(args.bits),
          group(args.group),
          rows(args.rows),
          columns(args.columns),
          padded(up_to(args.columns, most(kColumns, args.group))) {}

    int64_t groups() const { return padded / group; }
    int64_t panels() const { return parts(rows, kPanel); }
    int64_t panel_bytes() const { return padded * kPanel * bits / 8; }
    // Rows of the panel that the weight has.
    int64_t width(int64_t panel) const { return least(kPanel, rows - panel * kPanel); }
    // The zero of a symmetric weight; also what makes codes signed.
    int32_t middle() const { return 1 << (bits - 1); }

    uint8_t* codes_of(int64_t panel) const { return codes + panel * panel_bytes(); }
    uint16_t* scales_of(int64_t panel) const { return scales + panel * groups() * kPanel; }
    uint16_t* zeros_of(int64_t panel) const { return zeros ? zeros + panel * groups() * kPanel : nullptr; }
};

// Elements [at, at + n) of a row of float32 or bf16, n <= 16; the other lanes are 0.
SGL_INLINE f32x16 load_row(const void* row, int64_t type, int64_t at, int64_t n) {
    if (type == kBF16) return load_bf16_first(static_cast<const bf16*>(row) + at, n);
    return load_first(static_cast<const float*>(row) + at, n);
}

SGL_INLINE void store_row(void* row, int64_t type, int64_t at, f32x16 x, int64_t n) {
    if (type == kBF16) return store_bf16_first(static_cast<bf16*>(row) + at, x, n);
    store_first(static_cast<float*>(row) + at, x, n);
}

SGL_INLINE const void* row_of(const void* rows, int64_t type, int64_t stride, int64_t row) {
    return static_cast<const char*>(rows) + row * stride * (type == kBF16 ? 2 : 4);
}
SGL_INLINE void* row_of(void* rows, int64_t type, int64_t stride, int64_t row) {
    return static_cast<char*>(rows) + row * stride * (type == kBF16 ? 2 : 4);
}

}  // namespace sgl::SGL_ISA::quantized
