// The innermost loops: R tokens times P panels, sums in registers.
//
// A token's inputs come as words of four bytes, [step][R]: a float, or two inputs of bf16 where the processor
// multiplies pairs. Each sum is one chain in the order of the inputs, so it has the same bits in whatever block it is
// computed.
#pragma once

#include "product.h"

namespace sgl::SGL_ISA {

constexpr bool kMultipliesPairs = SGL_LEVEL >= 5 || SGL_LEVEL == 1;
// Blocks as the registers allow: sums, panels of weights and a word of x.
constexpr int kMostTokens = SGL_LEVEL >= 3 ? 12 : 6;
constexpr int panels_at_once(int tokens) {
    if (SGL_LEVEL >= 3) return tokens <= 6 ? 4 : 2;
    return tokens <= 3 ? 2 : 1;
}

SGL_INLINE f32x16 set1_at(const uint32_t* word) {
    float value;
    std::memcpy(&value, word, 4);
    return set1(value);
}

// Panels of float32.
struct Floats {
    static constexpr int parts = 1;  // words of x for a line
    template <int Part>
    SGL_INLINE f32x16 weights(const char* at) { return load(reinterpret_cast<const float*>(at)); }
    SGL_INLINE f32x16 value(const uint32_t* word) { return set1_at(word); }
    SGL_INLINE f32x16 accumulate(f32x16 sum, f32x16 w, f32x16 x) { return fma(w, x, sum); }
};
// Panels of bf16, x widened to float32.
struct Widened {
    static constexpr int parts = 2;
    template <int Part>
    SGL_INLINE f32x16 weights(const char* at) {
        return Part == 0 ? pair_first(load_line(at)) : pair_second(load_line(at));
    }
    SGL_INLINE f32x16 value(const uint32_t* word) { return set1_at(word); }
    SGL_INLINE f32x16 accumulate(f32x16 sum, f32x16 w, f32x16 x) { return fma(w, x, sum); }
};
// Panels and x of bf16.
struct Pairs {
    static constexpr int parts = 1;
    template <int Part>
    SGL_INLINE line weights(const char* at) { return load_line(at); }
    SGL_INLINE line value(const uint32_t* word) { return broadcast4(word); }
    SGL_INLINE f32x16 accumulate(f32x16 sum, line w, line x) { return dot_bf16(sum, w, x); }
};

struct Pass {
    const char* panels[4];
    const uint32_t* words;
    int64_t lines;
    float* sums;    // [R][width]
    int64_t width;  // of a row of sums
    bool is_first;  // sums start at zero
    int64_t jump;   // bytes from the end of these lines to those that the thread reads next
};
using Micro = void (*)(const Pass&);

template <class Scheme, int R, int P, int Part>
SGL_INLINE void add_part(f32x16 (&sums)[R][P], const Pass& pass, int64_t offset, const uint32_t* words) {
    decltype(Scheme::template weights<Part>(nullptr)) w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) w[p] = Scheme::template weights<Part>(pass.panels[p] + offset);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        auto x = Scheme::value(words + r);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = Scheme::accumulate(sums[r][p], w[p], x);
    }
}

// Lines are fetched this many bytes before they are read: the processor's own guess stops at the end of every page.
constexpr int64_t kAhead = 2048;

template <class Scheme, int R, int P>
void micro(const Pass& given) {
    const Pass pass = given;
    const int64_t end = pass.lines * kLineBytes, turn = end - kAhead;
    f32x16 sums[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = pass.is_first ? zero() : load(pass.sums + r * pass.width + p * kRows);
    const uint32_t* words = pass.words;
    for (int64_t offset = 0; offset < end; offset += kLineBytes, words += Scheme::parts * R) {
        int64_t fetched = offset + kAhead + (offset < turn ? 0 : pass.jump);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) __builtin_prefetch(pass.panels[p] + fetched, 0, 3);
        add_part<Scheme, R, P, 0>(sums, pass, offset, words);
        if constexpr (Scheme::parts == 2) add_part<Scheme, R, P, 1>(sums, pass, offset, words + R);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) store(pass.sums + r * pass.width + p * kRows, sums[r][p]);
}

// The loops for every number of tokens: of one panel, and of as many as the registers allow.
template <class Scheme>
struct Micros {
    Micro one[kMostTokens + 1] = {}, many[kMostTokens + 1] = {};

    constexpr Micros() { fill<kMostTokens>(); }
    template <int R>
    constexpr void fill() {
        one[R] = micro<Scheme, R, 1>;
        many[R] = micro<Scheme, R, panels_at_once(R)>;
        if constexpr (R > 1) fill<R - 1>();
    }
};

}  // namespace sgl::SGL_ISA
