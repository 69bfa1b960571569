// Rows of a pool as words for the products of attention, and heads of queries as its panels.
#pragma once

#include <algorithm>

#include "../attention/products.h"
#include "../attention/transpose.h"
#include "sparse.h"

namespace sgl::SGL_ISA {

constexpr int64_t kBlockRows = 64;

inline int64_t up_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <class Words>
using Plain = std::conditional_t<Words::per_word == 1, float, bf16>;

// Sixteen elements of a row from `at` on; zero from `size` on.
SGL_INLINE f32x16 sixteen(const char* row, int64_t type, int64_t at, int64_t size) {
    int64_t n = std::min<int64_t>(16, size - at);
    if (n <= 0) return zero();
    if (type == kF32) return get(reinterpret_cast<const float*>(row) + at, n);
    if (type == kBF16) return get(reinterpret_cast<const bf16*>(row) + at, n);
    const auto* from = reinterpret_cast<const uint16_t*>(row) + at;
    if (n == 16) return load_f16(from);
    alignas(32) uint16_t lanes[16] = {};
    std::memcpy(lanes, from, static_cast<size_t>(n) * 2);
    return load_f16(lanes);
}

inline int64_t bytes_of(int64_t type) { return type == kF32 ? 4 : type == kCodes ? 1 : 2; }

// How rows of `size` elements are stored: as numbers of `type`, or as codes: float8 e4m3 but for the last `exact`, which are
// bf16; then a byte for each `group` (a multiple of 16) of the former, the exponent of its scale.
struct Form {
    int64_t type, size, exact, group;

    template <class Args>
    static Form of(const Args& args) { return {args.row_type, args.size, args.exact, args.group}; }
    int64_t codes() const { return size - exact; }
    int64_t bytes() const {
        return type == kCodes ? size + exact + (codes() + group - 1) / group : size * bytes_of(type);
    }
};

// Sixteen elements of a row of codes from `at` on. A float8 is a float16 of which the exponent is 8 less.
inline f32x16 decoded(const char* row, const Form& form, int64_t at) {
    int64_t codes = form.codes(), n = std::min<int64_t>(16, codes - at);
    if (n <= 0) return sixteen(row + codes, kBF16, at - codes, form.exact);
    const auto* bytes = reinterpret_cast<const uint8_t*>(row) + at;
    alignas(32) uint16_t halves[16] = {};
    for (int64_t i = 0; i < n; ++i) {
        int code = bytes[i] & 0x7f;
        halves[i] = static_cast<uint16_t>((bytes[i] & 0x80) << 8 | (code == 0x7f ? 0x7fff : code << 7));
    }
    uint32_t bits = static_cast<uint32_t>(static_cast<uint8_t>(row[form.size + form.exact + at / form.group])) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    f32x16 values = mul(load_f16(halves), set1(256.0f * scale));
    if (n == 16) return values;
    alignas(64) float mixed[16];
    store(mixed, values);
    for (int64_t i = n; i < std::min<int64_t>(16, form.size - at); ++i) {
        bf16 exact;
        std::memcpy(&exact, row + codes + 2 * (i - n), 2);
        mixed[i] = from_bf16(exact);
    }
    return load(mixed);
}

// A row, or zeros for null, as `padded` (a multiple of 16) floats; or as bf16, which it then has to be, or codes, which bf16 holds.
inline void copy_row(const char* row, const Form& form, int64_t padded, float* to) {
    if (row == nullptr) return static_cast<void>(std::fill_n(to, padded, 0.0f));
    for (int64_t i = 0; i < padded; i += 16)
        store(to + i, form.type == kCodes ? decoded(row, form, i) : sixteen(row, form.type, i, form.size));
}
inline void copy_row(const char* row, const Form& form, int64_t padded, bf16* to) {
    if (row == nullptr) return static_cast<void>(std::fill_n(to, padded, bf16{0}));
    if (form.type == kCodes) {
        for (int64_t i = 0; i < padded; i += 16) store_bf16(to + i, decoded(row, form, i));
    } else {
        const auto* from = reinterpret_cast<const bf16*>(row);
        int64_t i = 0;
        for (; i + 32 <= form.size; i += 32) std::memcpy(to + i, from + i, 64);
        std::memcpy(to + i, from + i, static_cast<size_t>(form.size - i) * 2);
        std::memset(to + form.size, 0, static_cast<size_t>(padded - form.size) * 2);
    }
}

// Sizes in elements of what the products read: keys in words of `per_word`, and results in rows.
template <class Words>
constexpr int64_t kUnit = Words::depth_unit == 1 ? 16 * Words::per_word : 32;

// The heads [first, first + 16) of one token, `head_stride` elements apart, as a panel [depth][16] of words; `rows` is memory for 16
// rows of `depth` words, a multiple of 16.
template <class Words>
void pack_heads(const char* q, int64_t type, int64_t head_stride, int64_t first, int64_t heads, int64_t size,
                int64_t depth, uint32_t* rows, uint32_t* panel) {
    for (int64_t i = 0; i < kPanel; ++i) {
        const char* head = first + i < heads ? q + (first + i) * head_stride * bytes_of(type) : nullptr;
        copy_row(head, {type, size, 0, 0}, depth * Words::per_word, reinterpret_cast<Plain<Words>*>(rows + i * depth));
    }
    for (int64_t k = 0; k < depth; k += 16) transpose(rows + k, depth, panel + k * kPanel, kPanel);
}

// run(Words{}) with the words that serve these types best.
template <class Run>
void with_words(int64_t type, int64_t row_type, Run&& run) {
#if SGL_LEVEL >= 5
    if (type == kBF16 && (row_type == kBF16 || row_type == kCodes)) {
#if SGL_LEVEL >= 6
        return run(Tiles{});
#else
        return run(Pairs{});
#endif
    }
#endif
    (void)type, (void)row_type;
    run(Floats{});
}

template <class Words>
struct TilesInUse {
#if SGL_LEVEL >= 6
    TilesInUse() {
        if (Words::depth_unit > 1) tile_configure(full_tiles());
    }
    ~TilesInUse() {
        if (Words::depth_unit > 1) tile_release();
    }
#endif
};

}  // namespace sgl::SGL_ISA
