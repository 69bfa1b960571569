// Tokens of one tile times one or two panels of a weight.
//
// Every level and every number of tokens computes an output by the same operations in the same order: for each group the
// exact integer sum of (code - middle) * x, then in float32 (minus (zero - middle) times the sum of x where there are
// zeros), times scale * scale of x, added by one fused operation. So results agree to the last bit.
#pragma once

#include "activations.h"

namespace sgl::SGL_ISA::quantized {

constexpr int64_t kTileTokens = 16;
using Sums = float[kTileTokens * kPanel];  // [token][row of the panel]

// Two panels that share the loads of activations; where only one is wanted the second is it again, and its sums undefined.
struct Panels {
    int64_t panel[2];
    int64_t count;
    int64_t next;  // how many panels further the same thread most likely goes on
};

// Panels with what was done before their first product.
struct PreparedPanels {
    const Weight& weight;
    Panels panels;
    const uint8_t* codes[2];  // of one byte each, for products of tiles; null where vectors read the weight itself
};

// Memory of a thread's own for preparing.
size_t panel_scratch_bytes(const Weight& weight, int64_t tokens);
PreparedPanels prepare(const Weight& weight, const Panels& panels, int64_t tokens, void* scratch);

// Before a thread's first product.
void begin(const Activations& x);
// All tokens of the tile.
void product(const PreparedPanels& panels, const Activations& x, int64_t tile, Sums (&sums)[2]);

}  // namespace sgl::SGL_ISA::quantized
