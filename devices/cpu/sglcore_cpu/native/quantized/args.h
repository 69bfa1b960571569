// What the kernels of quantised weights are given.
#pragma once

#include "kernels.h"

// A weight [rows, columns]: codes of `bits` (8 or 4) and float16 scales, one for `group` columns, in panels of 16 rows.
// weight = scale * multiplier * (code - zero); `zeros` is null where every zero is 128 (8 bits) or 8 (4 bits).
#define SGL_QUANTIZED_WEIGHT(P, I, D) \
    P(codes) P(scales) P(zeros) D(multiplier) I(bits) I(group) I(rows) I(columns)

// Activations [tokens, columns] of float32 or bf16, rows `x_stride` elements apart; `rounded` passes float32 results
// through bf16. The bias [rows] may be null.
#define SGL_LINEAR_QUANTIZED_ARGS(P, I, D)                                      \
    P(x) I(x_stride) I(x_type) I(tokens) SGL_QUANTIZED_WEIGHT(P, I, D) P(bias) I(bias_type) \
        P(out) I(out_stride) I(out_type) I(rounded)

// Rows by number, `ids` of 4 or 8 bytes; a number outside the weight makes a row of NaN.
#define SGL_QUANTIZED_ROWS_ARGS(P, I, D) \
    P(ids) I(id_bytes) I(count) SGL_QUANTIZED_WEIGHT(P, I, D) P(out) I(out_stride) I(out_type)

#define SGL_DEQUANTIZE_ARGS(P, I, D) SGL_QUANTIZED_WEIGHT(P, I, D) P(out) I(out_stride) I(out_type)

// Codes of one byte [rows, columns] and float32 scales and zeros (or null) [rows, groups], both contiguous but for the
// codes' row stride, to panels.
#define SGL_PACK_CODES_ARGS(P, I, D) \
    P(source) I(source_stride) P(source_scales) P(source_zeros) SGL_QUANTIZED_WEIGHT(P, I, D)

// A plain weight to panels. The multiplier is written to `chosen` (a double), NaN where the weight is not finite; the
// record's own is not read.
#define SGL_QUANTIZE_ROWS_ARGS(P, I, D) \
    P(source) I(source_stride) I(source_type) P(chosen) SGL_QUANTIZED_WEIGHT(P, I, D)

SGL_ARGS(LinearQuantizedArgs, SGL_LINEAR_QUANTIZED_ARGS)
SGL_ARGS(QuantizedRowsArgs, SGL_QUANTIZED_ROWS_ARGS)
SGL_ARGS(DequantizeArgs, SGL_DEQUANTIZE_ARGS)
SGL_ARGS(PackCodesArgs, SGL_PACK_CODES_ARGS)
SGL_ARGS(QuantizeRowsArgs, SGL_QUANTIZE_ROWS_ARGS)
