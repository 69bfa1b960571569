// One product as the methods see it: activations, panels, and what becomes of the sums.
#pragma once

#include "finish.h"
#include "isa.h"
#include "linear.h"

namespace sgl::SGL_ISA {

constexpr int64_t kRows = 16;        // of a panel
constexpr int64_t kLineBytes = 64;   // one input of float32 or two of bf16, for the sixteen rows
constexpr int64_t kPairsDepth = 32;  // bf16 panels are padded to a multiple of this many inputs

SGL_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
SGL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SGL_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Lines of a panel.
SGL_INLINE int64_t panel_lines(int64_t type, int64_t in_features) {
    return type == kF32 ? in_features : ceil_div(in_features, kPairsDepth) * kPairsDepth / 2;
}

struct Product {
    const char* x;
    int64_t x_stride, type, tokens, in_features;
    const char* panels;
    int64_t lines;  // of each panel
    int64_t units;  // columns of panels that are finished together: a panel, or one of gate and its one of up
    int64_t unit_panels;
    Finish finish;

    int64_t panel_bytes() const { return lines * kLineBytes; }
    int64_t element_bytes() const { return type == kF32 ? 4 : 2; }
    const char* row(int64_t token) const { return x + token * x_stride * element_bytes(); }
    // Panel `i` of those of the units from `unit` on: gate and up by turns where a unit has both.
    const char* panel_at(int64_t unit, int64_t i) const {
        int64_t is_up = i % unit_panels;
        return panels + (unit + i / unit_panels + is_up * units) * panel_bytes();
    }
};

// A part of the result: tokens [first, last) of units [unit, unit + units).
struct Place {
    int64_t first, last, unit, units;
};

// The sums [tokens][width] of a place become results; a unit's panels are 16 columns each, side by side.
SGL_INLINE void finish_units(const Product& product, const float* sums, int64_t width, const Place& place) {
    for (int64_t token = place.first; token < place.last; ++token, sums += width)
        for (int64_t u = 0; u < place.units; ++u) {
            const float* own = sums + u * product.unit_panels * kRows;
            if (product.unit_panels == 2)
                product.finish.put_gated(token, place.unit + u, load(own), load(own + kRows));
            else
                product.finish.put(token, place.unit + u, load(own));
        }
}

// How many items of `bytes` of weights a thread claims at a time: some hundred KiB, but several claims for each thread;
// all of them where one thread is done before another is awake.
SGL_INLINE int64_t claim_size(int64_t items, int64_t bytes, int64_t threads) {
    constexpr int64_t wanted = 192 << 10, little = 64 << 10, claims = 6;
    if (items * bytes <= little) return most(1, items);
    return most(1, least(wanted / most(1, bytes), items / (claims * threads)));
}

// Register blocks of tokens and panels; for any product.
void multiply_blocks(const Product& product, Pool& pool);
#if SGL_LEVEL >= 6
// Tiles; for products of bf16.
void multiply_tiles(const Product& product, Pool& pool);
#endif

}  // namespace sgl::SGL_ISA
