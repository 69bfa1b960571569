// The sampler's draw: one token for each row of logits.
#pragma once

#include "kernels.h"

// logits f32 or bf16 [rows, vocab] with a stride in elements; scale f32, greedy bool, top_k, top_p, min_p (each may be
// null) and positions i32 [rows]; seed_words i32 [rows, 2]; gumbel i32 [2, 16384], weight i32 [2, 8193], hashed_ids i32
// [vocab]; out: tokens i32, bad bool [rows].
#define SGL_DRAW_ARGS(P, I, D)                                                                                 \
    P(logits) I(stride) I(type) I(rows) I(vocab) P(scale) P(greedy) P(top_k) P(top_p) P(min_p) P(seed_words)   \
    P(positions) P(gumbel) P(weight) P(hashed_ids) P(tokens) P(bad)
SGL_ARGS(DrawArgs, SGL_DRAW_ARGS)
