// A panel times a tile of tokens by AMX: one product of tiles for 64 columns (or 32, where groups are that small); its
// integers are scaled into sums of float32 that stay in registers.
#pragma once

#include <utility>

#include "product.h"
#include "tiles.h"

#if SGL_LEVEL >= 6

namespace sgl::SGL_ISA::quantized {

// A panel whose codes are bytes: [padded / 4][16 rows][4].
struct BytePanel {
    const Weight& weight;
    int64_t panel;
    const uint8_t* codes;
    const uint8_t* ahead;  // what this thread will read from memory next
    int64_t ahead_lines;   // to be fetched with each group
};

// Two codes of four bits, of columns c and c + 4, as a byte each.
SGL_INLINE void spread(const Weight& weight, int64_t panel, uint8_t* out) {
    const uint8_t* codes = weight.codes_of(panel);
    const int64_t lines = weight.padded / 8;
    for (int64_t i = 0; i < lines; ++i) {
        line both = load_line(codes + 64 * i);
        store_line(out + 128 * i, low_nibbles(both));
        store_line(out + 128 * i + 64, high_nibbles(both));
    }
}

// Results 0 and 1, tokens 2 and 4, weights 3 and 5.
SGL_INLINE void configure_tiles(int64_t height, int64_t group) {
    int columns = group < kColumns ? static_cast<int>(group) : static_cast<int>(kColumns);
    TileShapes shapes;
    for (int tile : {0, 1}) shapes.set(tile, static_cast<int>(height), 64);
    for (int tile : {2, 4}) shapes.set(tile, static_cast<int>(height), columns);
    for (int tile : {3, 5}) shapes.set(tile, columns / 4, 64);
    tile_configure(shapes);
}

#define SGL_GROUP_PRODUCT(sum, a, b, first)                                              \
    SGL_TILE_ZERO(sum);                                                                  \
    for (int64_t at = (first), end = at + x.group; at < end; at += step) {                \
        SGL_TILE_LOAD(a, tokens + at / kColumns * x.height * kColumns + at % kColumns, kColumns); \
        SGL_TILE_LOAD(b, panel.codes + at * kPanel, 64);                                 \
        SGL_TILE_S8U8(sum, a, b);                                                        \
    }

// The integers [Tokens][16] of one group, of unsigned codes, corrected and scaled, to the totals.
template <bool Zeros, int Tokens>
SGL_INLINE void add_group(f32x16 (&total)[Tokens], const BytePanel& panel, const TileView& x, int64_t group,
                          const int32_t* dots) {
    const Weight& weight = panel.weight;
    const uint8_t* ahead = panel.ahead + group * panel.ahead_lines * 64;
    for (int64_t i = 0; i < panel.ahead_lines; ++i) __builtin_prefetch(ahead + 64 * i, 0, 2);
    f32x16 scale = load_f16(weight.scales_of(panel.panel) + group * kPanel), shift = zero();
    if constexpr (Zeros)
        shift = sub(set1(static_cast<float>(weight.middle())), load_f16(weight.zeros_of(panel.panel) + group * kPanel));
    int64_t place = group * x.height;
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
        f32x16 dot = to_f32(add_i32(load_i32(dots + t * kPanel), set1_i32(x.corrections[place + t])));
        if constexpr (Zeros) dot = fma(shift, set1(x.sums[place + t]), dot);
        total[t] = fma(dot, mul(scale, set1(x.scales[place + t])), total[t]);
    }
}

template <bool Zeros, int Tokens>
void tile_panel(const BytePanel& panel, const Activations& x, int64_t tile, float* sums) {
    TileView view(x, tile, 0);
    const int8_t* tokens = view.codes;
    const int64_t step = least(x.group, kColumns), groups = x.groups();
    alignas(64) int32_t dots[2][kTileTokens * kPanel];
    f32x16 total[Tokens];
    for (int t = 0; t < Tokens; ++t) total[t] = zero();
    int64_t group = 0;
    // Two results, so that one is scaled while the other is computed.
    for (; group + 2 <= groups; group += 2) {
        SGL_GROUP_PRODUCT(0, 2, 3, group * x.group)
        SGL_TILE_STORE(0, dots[0], 64);
        SGL_GROUP_PRODUCT(1, 4, 5, (group + 1) * x.group)
        SGL_TILE_STORE(1, dots[1], 64);
        add_group<Zeros>(total, panel, view, group, dots[0]);
        add_group<Zeros>(total, panel, view, group + 1, dots[1]);
    }
    if (group < groups) {
        SGL_GROUP_PRODUCT(0, 2, 3, group * x.group)
        SGL_TILE_STORE(0, dots[0], 64);
        add_group<Zeros>(total, panel, view, group, dots[0]);
    }
    for (int t = 0; t < Tokens; ++t) store(sums + t * kPanel, total[t]);
}

#undef SGL_GROUP_PRODUCT

using TilePanel = void (*)(const BytePanel&, const Activations&, int64_t, float*);

template <bool Zeros, int... Less>
TilePanel tile_panel_of(int64_t height, std::integer_sequence<int, Less...>) {
    static constexpr TilePanel kByHeight[] = {tile_panel<Zeros, Less + 1>...};
    return kByHeight[height - 1];
}

SGL_INLINE void tile_dots(const BytePanel& panel, const Activations& x, int64_t tile, float* sums) {
    constexpr std::make_integer_sequence<int, kTileTokens> heights;
    if (panel.weight.zeros) return tile_panel_of<true>(x.height, heights)(panel, x, tile, sums);
    tile_panel_of<false>(x.height, heights)(panel, x, tile, sums);
}

}  // namespace sgl::SGL_ISA::quantized

#endif
