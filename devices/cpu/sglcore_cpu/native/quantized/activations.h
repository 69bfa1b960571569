// Activations as signed bytes with one scale per token and group of columns: scale = largest magnitude / 127,
// code = the nearest integer to x * (127 / largest magnitude), ties to even.
#pragma once

#include "weight.h"

namespace sgl::SGL_ISA::quantized {

// Tokens in tiles of `height` (at most 16) rows: codes [tiles][columns / 64][height][64], the rest
// [tiles][groups][height]. The last tile's rows beyond `tokens` are undefined.
struct Activations {
    int8_t* codes;
    float* scales;         // times the weight's multiplier
    float* sums;           // of the codes of a group
    int32_t* corrections;  // -middle * sum: what dots of unsigned codes have too much
    int64_t tokens, height, padded, group;

    int64_t tiles() const { return parts(tokens, height); }
    int64_t groups() const { return padded / group; }
    int64_t tile_bytes() const { return height * padded; }
    int64_t tokens_of(int64_t tile) const { return least(height, tokens - tile * height); }
};

// Some tokens of one tile.
struct TileView {
    int8_t* codes;
    float* scales;
    float* sums;
    int32_t* corrections;
    int64_t height;

    TileView(const Activations& x, int64_t tile, int64_t token)
        : codes(x.codes + tile * x.tile_bytes() + token * kColumns),
          scales(x.scales + tile * x.groups() * x.height + token),
          sums(x.sums + tile * x.groups() * x.height + token),
          corrections(x.corrections + tile * x.groups() * x.height + token),
          height(x.height) {}
};

// The memory of `tokens` activations for this weight.
size_t activation_bytes(const Weight& weight, int64_t tokens);

// Quantise rows of x into `memory` (aligned to 64) by all threads, or by the caller where there is little to do.
Activations quantize(const void* x, int64_t type, int64_t stride, int64_t tokens, const Weight& weight,
                     float multiplier, void* memory, Pool& pool);

}  // namespace sgl::SGL_ISA::quantized
