// Panels times some tokens by dot products of bytes in vector registers.
#pragma once

#include "product.h"

namespace sgl::SGL_ISA::quantized {

// Sums of integers and of floats for each token and panel: 24 of 32 registers, or 8 of 16. A tile of more than two tokens
// is cut into passes of three to six, each over two panels; fewer tokens go with one stream from memory.
#if SGL_LEVEL >= 3
constexpr int kMostTokens = 6;
#else
constexpr int kMostTokens = 2;
#endif
constexpr int64_t kFewTokens = 2;
constexpr int64_t kAhead = 4096;  // bytes: the hardware's own prefetch falls behind where a line is much work

#define SGL_MEMBER inline __attribute__((always_inline))

// Where prefetching goes on: `step` bytes for each line that is read.
struct Ahead {
    const uint8_t* at;
    int64_t step;
};

// The panels' groups in the order in which they are read.
template <int Bits, int Group, int Tokens, int Panels_>
struct PanelReader {
    const uint8_t* codes[Panels_];
    const uint16_t* scales[Panels_];
    const uint16_t* zeros[Panels_];
    Ahead ahead[Panels_];
    TileView x;
    int64_t step;  // to the next 32 columns of x: the other half of 64, and the next 64, by turns
    f32x16 total[Panels_][Tokens];

    SGL_MEMBER void group() {
        i32x16 dots[Panels_][Tokens];
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t)
#pragma GCC unroll 2
            for (int p = 0; p < Panels_; ++p) dots[p][t] = set1_i32(x.corrections[t]);
#pragma GCC unroll 1
        for (int part = 0; part < Group / 32; ++part) {
#pragma GCC unroll 8
            for (int i = 0; i < Bits; ++i) dot_line(dots, i);
#pragma GCC unroll 2
            for (int p = 0; p < Panels_; ++p) codes[p] += 64 * Bits;
            x.codes += step;
            step = x.height * kColumns - step;
        }
#pragma GCC unroll 2
        for (int p = 0; p < Panels_; ++p) scale(dots[p], p);
        x.corrections += x.height, x.scales += x.height, x.sums += x.height;
    }

  private:
    SGL_MEMBER void dot_line(i32x16 (&dots)[Panels_][Tokens], int i) {
        line whole[Panels_], other[Panels_];
#pragma GCC unroll 2
        for (int p = 0; p < Panels_; ++p) {
            whole[p] = other[p] = load_line(codes[p] + 64 * i);
            __builtin_prefetch(ahead[p].at, 0, 2);
            ahead[p].at += ahead[p].step;
            if constexpr (Bits == 4) whole[p] = low_nibbles(other[p]), other[p] = high_nibbles(other[p]);
        }
        constexpr int kBytes = 32 / Bits;
        dot_words(dots, whole, x.codes + kBytes * i);
        if constexpr (Bits == 4) dot_words(dots, other, x.codes + kBytes * i + 4);
    }

    SGL_MEMBER void dot_words(i32x16 (&dots)[Panels_][Tokens], const line (&lines)[Panels_], const int8_t* words) {
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            line word = broadcast4(words + t * kColumns);
#pragma GCC unroll 2
            for (int p = 0; p < Panels_; ++p)
                dots[p][t] = Bits == 8 ? dot_u8s8(dots[p][t], lines[p], word) : dot_u4s8(dots[p][t], lines[p], word);
        }
    }

    SGL_MEMBER void scale(const i32x16 (&dots)[Tokens], int p) {
        f32x16 whole[Tokens], factor = load_f16(scales[p]);
        scales[p] += kPanel;
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) whole[t] = to_f32(dots[t]);
        if (zeros[p]) {
            f32x16 shift = sub(set1(Bits == 8 ? 128.0f : 8.0f), load_f16(zeros[p]));
            zeros[p] += kPanel;
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) whole[t] = fma(shift, set1(x.sums[t]), whole[t]);
        }
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) total[p][t] = fma(whole[t], mul(factor, set1(x.scales[t])), total[p][t]);
    }
};

#undef SGL_MEMBER

// Some tokens of a tile: the pass-th of `passes` over the same panels.
struct Pass {
    TileView x;
    int64_t token, number, passes;
};

template <int Bits, int Group, int Tokens, int Panels_>
void dot_panels(const Weight& weight, const Panels& panels, const Pass& pass, Sums* sums) {
    using Reader = PanelReader<Bits, Group, Tokens, Panels_>;
    Reader reader{{}, {}, {}, {}, pass.x, 32, {}};
#pragma GCC unroll 2
    for (int p = 0; p < Panels_; ++p) {
        int64_t panel = panels.panel[p], bytes = weight.panel_bytes();
        reader.codes[p] = weight.codes_of(panel);
        reader.scales[p] = weight.scales_of(panel);
        reader.zeros[p] = weight.zeros_of(panel);
        // Passes share out the panels that follow, so that memory is never idle; one pass over one panel is near enough
        // to the hardware's own prefetch.
        int64_t distance = panels.next * bytes + pass.number * bytes / pass.passes;
        if (pass.passes == 1 && Panels_ == 1) distance = kAhead;
        reader.ahead[p] = {reader.codes[p] + distance, 64 / pass.passes};
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) reader.total[p][t] = zero();
    }
    for (int64_t left = weight.groups(); left > 0; --left) reader.group();
#pragma GCC unroll 2
    for (int p = 0; p < Panels_; ++p)
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) store(sums[p] + (pass.token + t) * kPanel, reader.total[p][t]);
}

using DotPanels = void (*)(const Weight&, const Panels&, const Pass&, Sums*);

template <int Bits, int Group>
DotPanels dot_panels_of(int64_t tokens) {
    switch (tokens) {
#if SGL_LEVEL >= 3
        case 6: return dot_panels<Bits, Group, 6, 2>;
        case 5: return dot_panels<Bits, Group, 5, 2>;
        case 4: return dot_panels<Bits, Group, 4, 2>;
        case 3: return dot_panels<Bits, Group, 3, 2>;
#endif
        case 2: return dot_panels<Bits, Group, 2, 1>;
        default: return dot_panels<Bits, Group, 1, 1>;
    }
}

template <int Bits>
DotPanels dot_panels_of(int64_t group, int64_t tokens) {
    if (group == 32) return dot_panels_of<Bits, 32>(tokens);
    return group == 64 ? dot_panels_of<Bits, 64>(tokens) : dot_panels_of<Bits, 128>(tokens);
}

// All tokens of a tile, in passes as even as can be.
SGL_INLINE void dots_of_tile(const Weight& weight, const Panels& panels, const Activations& x, int64_t tile,
                             Sums (&sums)[2]) {
    int64_t tokens = x.tokens_of(tile), passes = parts(tokens, kMostTokens), size = parts(tokens, passes);
    for (int64_t token = 0, number = 0; token < tokens; token += size, ++number) {
        int64_t count = least(size, tokens - token);
        Pass pass{TileView(x, tile, token), token, tile * passes + number, x.tiles() * passes};
        DotPanels run = weight.bits == 8 ? dot_panels_of<8>(weight.group, count) : dot_panels_of<4>(weight.group, count);
        run(weight, panels, pass, sums);
        if (count > kFewTokens || panels.count == 1) continue;
        run(weight, {{panels.panel[1], panels.panel[1]}, 1, panels.next}, pass, sums + 1);
    }
}

}  // namespace sgl::SGL_ISA::quantized
