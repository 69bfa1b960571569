// The two matrix products of blocked attention, both with queries in lanes: scores = keys x queries, and
// sums += values x probabilities.
//
// Operands are words of four bytes: a float, or two bf16 that follow each other along the summed dimension. The right
// one lies in panels of sixteen queries, [depth][16] words; results are panels [rows][16] of floats.
#pragma once

#include "isa.h"
#include "tiles.h"

namespace sgl::SGL_ISA {

constexpr int64_t kPanel = 16;
constexpr int kRowsAtOnce = SGL_LEVEL >= 3 ? 8 : 4;
constexpr int kPanelsAtOnce = SGL_LEVEL >= 3 ? 3 : 1;

// The left operand: word (row, depth) lies at data[row * row_stride + depth * depth_stride].
struct Left {
    const uint32_t* data;
    int64_t rows, depth, row_stride, depth_stride;
};
// Panels of queries, so many words apart.
struct Panels {
    const uint32_t* data;
    int64_t count, stride;
};
// Where results go. `factors` ([16] for each panel): what is there already is multiplied by them and added to; null: it is
// overwritten.
struct Result {
    float* data;
    int64_t stride;
    const float* factors;
};

struct Floats {
    static constexpr int64_t per_word = 1, row_unit = kRowsAtOnce, depth_unit = 1;
    SGL_INLINE f32x16 step(f32x16 sum, const uint32_t* left, const uint32_t* words) {
        float value;
        std::memcpy(&value, left, 4);
        return fma(set1(value), load(reinterpret_cast<const float*>(words)), sum);
    }
    // Two rows of a right operand, probabilities, that follow each other along the depth.
    SGL_INLINE void put(uint32_t* words, f32x16 even, f32x16 odd) {
        store(reinterpret_cast<float*>(words), even);
        store(reinterpret_cast<float*>(words) + kPanel, odd);
    }
};

#if SGL_LEVEL >= 5
struct Pairs {
    static constexpr int64_t per_word = 2, row_unit = kRowsAtOnce, depth_unit = 1;
    SGL_INLINE f32x16 step(f32x16 sum, const uint32_t* left, const uint32_t* words) {
        return dot_bf16(sum, load_line(words), broadcast4(left));
    }
    // Rounded half up: they are positive.
    SGL_INLINE void put(uint32_t* words, f32x16 even, f32x16 odd) {
        __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
        __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even.v), half), 16);
        __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd.v), half), upper);
        _mm512_storeu_si512(words, _mm512_or_si512(low, high));
    }
};
#endif

template <class Words, int P, int R>
SGL_INLINE void small_product(const Left& left, int64_t row, const Panels& right, int64_t panel, const Result& to) {
    // Four rows from each of these: as many addresses as there are rows would not stay in registers.
    const uint32_t* a[R / 4];
    for (int i = 0; i < R / 4; ++i) a[i] = left.data + (row + 4 * i) * left.row_stride;
    const uint32_t* b = right.data + panel * right.stride;
    const int64_t places[4] = {0, left.row_stride, 2 * left.row_stride, 3 * left.row_stride};
    float* out = to.data + panel * to.stride + row * kPanel;
    f32x16 sum[P][R];
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r)
            sum[p][r] = to.factors == nullptr ? zero()
                                              : mul(load(out + p * to.stride + r * kPanel),
                                                    load(to.factors + (panel + p) * kPanel));
    for (int64_t k = 0; k < left.depth; ++k) {
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                sum[p][r] = Words::step(sum[p][r], a[r / 4] + places[r % 4], b + p * right.stride + k * kPanel);
        for (int i = 0; i < R / 4; ++i) a[i] += left.depth_stride;
    }
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r) store(out + p * to.stride + r * kPanel, sum[p][r]);
}

// Of one panel twice as many rows at once, so that as many sums are under way.
template <class Words, int P>
void product_of_panels(const Left& left, const Panels& right, int64_t panel, const Result& to) {
    constexpr int kMost = P == 1 && kPanelsAtOnce > 1 ? 2 * kRowsAtOnce : kRowsAtOnce;
    int64_t row = 0;
    for (; row + kMost <= left.rows; row += kMost) small_product<Words, P, kMost>(left, row, right, panel, to);
    for (; row < left.rows; row += kRowsAtOnce) small_product<Words, P, kRowsAtOnce>(left, row, right, panel, to);
}

// left.rows is a multiple of Words::row_unit, left.depth of Words::depth_unit.
template <class Words>
void product(const Left& left, const Panels& right, const Result& to) {
    int64_t panel = 0;
    for (; panel + kPanelsAtOnce <= right.count; panel += kPanelsAtOnce)
        product_of_panels<Words, kPanelsAtOnce>(left, right, panel, to);
    if constexpr (kPanelsAtOnce > 2)
        for (; panel + 2 <= right.count; panel += 2) product_of_panels<Words, 2>(left, right, panel, to);
    for (; panel < right.count; ++panel) product_of_panels<Words, 1>(left, right, panel, to);
}

#if SGL_LEVEL >= 6

// bf16 through tiles: the left operand's depth lies side by side (depth_stride 1).
struct Tiles : Pairs {
    static constexpr int64_t row_unit = 32, depth_unit = 16;
};

inline TileShapes full_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
    return shapes;
}

// 32 rows times 2 panels, or 1: sums in tiles 0 to 3 (row block * 2 + panel), left in 4 and 5, right in 6 and 7.
template <bool Two>
inline void tile_product(const Left& left, int64_t row, const Panels& right, int64_t panel, const Result& to) {
    const uint32_t* a = left.data + row * left.row_stride;
    const uint32_t* b = right.data + panel * right.stride;
    float *out = to.data + panel * to.stride + row * kPanel, *next = out + to.stride;
    if (to.factors == nullptr) {
        SGL_TILE_ZERO(0);
        SGL_TILE_ZERO(1);
        SGL_TILE_ZERO(2);
        SGL_TILE_ZERO(3);
    } else {
        SGL_TILE_LOAD(0, out, 64);
        SGL_TILE_LOAD(2, out + 256, 64);
        if (Two) {
            SGL_TILE_LOAD(1, next, 64);
            SGL_TILE_LOAD(3, next + 256, 64);
        }
    }
    int64_t a_bytes = left.row_stride * 4;
    for (int64_t k = 0; k < left.depth; k += 16) {
        SGL_TILE_LOAD(4, a + k, a_bytes);
        SGL_TILE_LOAD(6, b + k * kPanel, 64);
        SGL_TILE_BF16(0, 4, 6);
        SGL_TILE_LOAD(5, a + 16 * left.row_stride + k, a_bytes);
        SGL_TILE_BF16(2, 5, 6);
        if (!Two) continue;
        SGL_TILE_LOAD(7, b + right.stride + k * kPanel, 64);
        SGL_TILE_BF16(1, 4, 7);
        SGL_TILE_BF16(3, 5, 7);
    }
    SGL_TILE_STORE(0, out, 64);
    SGL_TILE_STORE(2, out + 256, 64);
    if (!Two) return;
    SGL_TILE_STORE(1, next, 64);
    SGL_TILE_STORE(3, next + 256, 64);
}

// The tiles are configured as `full_tiles` says.
template <>
inline void product<Tiles>(const Left& left, const Panels& right, const Result& to) {
    for (int64_t panel = 0; panel < right.count && to.factors != nullptr; ++panel) {
        f32x16 factor = load(to.factors + panel * kPanel);
        float* out = to.data + panel * to.stride;
        for (int64_t row = 0; row < left.rows; ++row) store(out + row * kPanel, mul(load(out + row * kPanel), factor));
    }
    for (int64_t row = 0; row < left.rows; row += 32) {
        int64_t panel = 0;
        for (; panel + 2 <= right.count; panel += 2) tile_product<true>(left, row, right, panel, to);
        if (panel < right.count) tile_product<false>(left, row, right, panel, to);
    }
}

#endif

}  // namespace sgl::SGL_ISA
