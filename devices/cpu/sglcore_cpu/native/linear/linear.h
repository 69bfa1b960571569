// Linear layers over weights in panels of sixteen rows, in float32 and bf16.
//
// A panel holds its rows side by side: float32 as [in][16], bf16 as [in / 2][16][2] with `in` padded to a multiple of
// 32; rows are padded to a multiple of 16. What is padded is zero.
#pragma once

#include "kernels.h"

// out [tokens, out_features] = x [tokens, in_features] * panels^T + bias, which is null or of x's type. `type` is that
// of x and of the panels. `out_type` is the same, or kF32 for x of bf16: then the values are still rounded to bf16.
// Strides are in elements; the last dimension of x and out is contiguous.
#define SGL_LINEAR_ARGS(P, I, D) \
    P(x) I(x_stride) P(panels) I(type) P(bias) P(out) I(out_stride) I(out_type) \
    I(tokens) I(in_features) I(out_features)
SGL_ARGS(LinearArgs, SGL_LINEAR_ARGS)

// out [tokens, out_features / 2] = silu(x * gate^T) * (x * up^T) where the panels are those of gate over up, and
// out_features a multiple of 32. In bf16 the products, silu and the result are each rounded.
#define SGL_GATED_ARGS(P, I, D) \
    P(x) I(x_stride) P(panels) I(type) P(out) I(out_stride) I(tokens) I(in_features) I(out_features)
SGL_ARGS(GatedArgs, SGL_GATED_ARGS)

// Panels of `type` from the rows of `source` [out_features, in_features] of `source_type`, at any address.
#define SGL_PACK_ARGS(P, I, D) \
    P(source) I(source_stride) I(source_type) P(panels) I(type) I(out_features) I(in_features)
SGL_ARGS(PackArgs, SGL_PACK_ARGS)

// out [tokens, in_features] of `out_type` = the rows `ids` of the panels. `id_bytes` is 4 or 8. An id outside
// [0, out_features) gives a row of NaN.
#define SGL_ROWS_ARGS(P, I, D) \
    P(ids) I(id_bytes) P(panels) I(type) P(out) I(out_stride) I(out_type) \
    I(tokens) I(in_features) I(out_features)
SGL_ARGS(RowsArgs, SGL_ROWS_ARGS)
