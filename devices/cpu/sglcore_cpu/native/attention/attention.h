// Attention over the paged pool. Everything that differs between steps (slots, lengths, the page table) is read when a
// kernel runs, so that a recorded call serves other contents at the same addresses.
//
// Cells are [cells, kv_heads, dim] of `kv_type`; for kI8 they are bytes [cells, kv_heads, dim + 4], a head's codes and
// behind them its scale as a float. The token at position p of slot s lies in cell
// page_table[s][p / page_size] * page_size + p % page_size. q and out are [tokens, heads * dim] of `q_type`, rows of q
// `q_stride` elements apart. `window` 0 means none. A row of slot 0 is padding: it comes out as zero, its cells unread.
//
// A scaled score s becomes softcap * tanh(s / softcap), unless that is 0. `sinks` [heads] of `sinks_type` are the scores of
// one more key that has no value; null means none.
#pragma once

#include "kernels.h"

#define SGL_LAYER_ARGS(P, I, D)                                                                                \
    P(q) I(q_stride) I(q_type) P(keys) P(values) I(kv_type) P(page_table) I(table_stride) P(slots) P(seq_lens) \
    P(out) I(rows) I(tokens) I(heads) I(kv_heads) I(dim) I(page_size) I(window) D(scaling) D(softcap)          \
    P(sinks) I(sinks_type)

// `rows` rows of one token each, token i being the last of slots[i]; tokens [rows, tokens) of out become zero. Bit 31 - d of
// visible[i] says whether it sees the key d before its own, for d < 32; null: each sees all.
#define SGL_DECODE_ARGS(P, I, D) SGL_LAYER_ARGS(P, I, D) P(visible)
SGL_ARGS(DecodeArgs, SGL_DECODE_ARGS)

// Row i brings the tokens [starts[i], starts[i + 1]), the last ones of slots[i]; tokens [starts[rows], tokens) of out
// become zero, those before starts[0] are not touched.
#define SGL_PREFILL_ARGS(P, I, D) SGL_LAYER_ARGS(P, I, D) P(starts)
SGL_ARGS(PrefillArgs, SGL_PREFILL_ARGS)

// Writes key and value [tokens, kv_heads, dim] of `type` as codes and scales into cells locations[t] (int64); rows are
// `key_stride` and `value_stride` elements apart. x = code * scale, scale = the largest magnitude of a head / 127.
#define SGL_STORE_INT8_ARGS(P, I, D)                                                                  \
    P(key) I(key_stride) P(value) I(value_stride) I(type) P(keys) P(values) P(locations) I(tokens) I(kv_heads) I(dim)
SGL_ARGS(StoreInt8Args, SGL_STORE_INT8_ARGS)
