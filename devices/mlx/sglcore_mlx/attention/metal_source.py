"""The Metal source of paged decode attention: kernel bodies, to which MLX adds the signature.

Names in capitals are template arguments: HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW (0: none),
QUERIES (query heads per threadgroup), SIMDGROUPS, BLOCK (positions that a simdgroup processes at
once), PART (positions per threadgroup), HAS_SOFTCAP, HAS_SINKS, HAS_VISIBLE and the types T
(result) and KV (KV cache). Online softmax: Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867, in base 2: `scale` and `softcap` are already multiplied by
log2(e). `metal.py` launches the kernels.
"""

from __future__ import annotations

HEADER = """
#define UNROLLED(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); ++i)
"""
"""Text before the function. A thread's arrays stay in registers only if loops over them are
unrolled."""

_SPAN = """
    const int length = seq_lens[row];
    const int oldest = WINDOW > 0 && length > WINDOW ? length - WINDOW : 0;
"""
"""The row's positions [oldest, length); parts begin at `oldest`, so they depend on the row's own
length only."""

_WALK = (
    """
    constexpr int PER_LANE = HEAD_DIM / 32;
    constexpr int CELL = 2 * KV_HEADS * HEAD_DIM;
    constexpr float LOWEST = -3.0e38f;
    constexpr float LOG2_E = 1.44269504f;
    threadgroup float tops[SIMDGROUPS * QUERIES];
    threadgroup float sums[SIMDGROUPS * QUERIES];
    threadgroup float shares[SIMDGROUPS * HEAD_DIM];

    const int lane = int(thread_index_in_simdgroup);
    const int walker = int(simdgroup_index_in_threadgroup);
    const int part = int(threadgroup_position_in_grid.x);
    const int first_head = int(threadgroup_position_in_grid.y) * QUERIES;
    const int row = int(threadgroup_position_in_grid.z);
    const int kv_head = first_head / (HEADS / KV_HEADS);
"""
    + _SPAN
    + """
    const int begin = oldest + part * PART;
    const int end = metal::min(length, begin + PART);
    // The same for the whole threadgroup, which therefore reaches no barrier.
    if (begin >= end) {
        return;
    }

    float query[QUERIES][PER_LANE];
    float values[QUERIES][PER_LANE];
    float top[QUERIES];
    float sum[QUERIES];
    // A sink counts as a key of the first part, and has no value.
    const bool counts_sinks = HAS_SINKS && part == 0 && walker == 0;
    UNROLLED(j, QUERIES) {
        top[j] = counts_sinks ? float(sinks[first_head + j]) * LOG2_E : LOWEST;
        sum[j] = counts_sinks ? 1.0f : 0.0f;
        UNROLLED(i, PER_LANE) {
            const int at = (row * HEADS + first_head + j) * HEAD_DIM + lane * PER_LANE + i;
            query[j][i] = float(queries[at]) * scale;
            values[j][i] = 0.0f;
        }
    }

    // BLOCK divides PAGE_SIZE and blocks begin at its multiples: a block lies in one page.
    for (int block = begin / BLOCK * BLOCK + walker * BLOCK; block < end; block += SIMDGROUPS * BLOCK) {
        const int page = page_table[row * page_table_shape[1] + block / PAGE_SIZE];
        const device KV* cell = kv + (int64_t(page) * PAGE_SIZE + block % PAGE_SIZE) * CELL
            + kv_head * HEAD_DIM + lane * PER_LANE;
        float scores[BLOCK][QUERIES];
        UNROLLED(t, BLOCK) {
            // A position that does not count reads the nearest that does: no branch, and nothing that is not the row's.
            const int near = metal::clamp(block + t, begin, end - 1) - block;
            bool counts = near == t;
            if (HAS_VISIBLE) {
                // Of a word, bit 31 - d is for the position d before the row's own, the last.
                const int before = length - 1 - block - t;
                counts = counts && (before > 31 || ((visible[row] >> (31 - before)) & 1) != 0);
            }
            float key[PER_LANE];
            UNROLLED(i, PER_LANE) {
                key[i] = float(cell[near * CELL + i]);
            }
            UNROLLED(j, QUERIES) {
                float dot = 0.0f;
                UNROLLED(i, PER_LANE) {
                    dot += query[j][i] * key[i];
                }
                dot = metal::simd_sum(dot);
                if (HAS_SOFTCAP) {
                    dot = softcap * metal::precise::tanh(dot / softcap);
                }
                scores[t][j] = counts ? dot : LOWEST;
            }
        }
        UNROLLED(j, QUERIES) {
            float highest = top[j];
            UNROLLED(t, BLOCK) {
                highest = metal::max(highest, scores[t][j]);
            }
            const float fade = metal::exp2(top[j] - highest);
            top[j] = highest;
            sum[j] *= fade;
            UNROLLED(i, PER_LANE) {
                values[j][i] *= fade;
            }
            UNROLLED(t, BLOCK) {
                scores[t][j] = metal::exp2(scores[t][j] - highest);
                sum[j] += scores[t][j];
            }
        }
        UNROLLED(t, BLOCK) {
            const int near = metal::clamp(block + t, begin, end - 1) - block;
            UNROLLED(i, PER_LANE) {
                const float value = float(cell[near * CELL + KV_HEADS * HEAD_DIM + i]);
                UNROLLED(j, QUERIES) {
                    values[j][i] += scores[t][j] * value;
                }
            }
        }
    }

    if (lane == 0) {
        UNROLLED(j, QUERIES) {
            tops[walker * QUERIES + j] = top[j];
            sums[walker * QUERIES + j] = sum[j];
        }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    UNROLLED(j, QUERIES) {
        const int head = first_head + j;
        float highest = LOWEST;
        UNROLLED(s, SIMDGROUPS) {
            highest = metal::max(highest, tops[s * QUERIES + j]);
        }
        float total = 0.0f;
        UNROLLED(s, SIMDGROUPS) {
            total += sums[s * QUERIES + j] * metal::exp2(tops[s * QUERIES + j] - highest);
        }
        const float fade = metal::exp2(top[j] - highest);
        UNROLLED(i, PER_LANE) {
            shares[walker * HEAD_DIM + lane * PER_LANE + i] = values[j][i] * fade;
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        for (int d = walker * 32 + lane; d < HEAD_DIM; d += SIMDGROUPS * 32) {
            float value = 0.0f;
            UNROLLED(s, SIMDGROUPS) {
                value += shares[s * HEAD_DIM + d];
            }
            %WRITE%
        }
        // `shares` is written again for the next query.
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
"""
)

DECODE = _WALK.replace("%WRITE%", "out[(row * HEADS + head) * HEAD_DIM + d] = T(value / total);")
"""Rows with one part. In: queries [B, HEADS, HEAD_DIM], kv, page_table, seq_lens, scale, softcap,
sinks, visible. Out: out [B, HEADS, HEAD_DIM]."""

PARTS = _WALK.replace(
    "%WRITE%",
    """const int64_t at = int64_t(row * HEADS + head) * threadgroups_per_grid.x + part;
            part_values[at * HEAD_DIM + d] = value;
            if (d == 0) {
                part_tops[at] = highest;
                part_sums[at] = total;
            }""",
)
"""Like DECODE, with one part of a row per threadgroup. Out, float32: part_values [B, HEADS, parts,
HEAD_DIM] (not divided by the sum), part_tops and part_sums [B, HEADS, parts]. Parts beyond a row's
length are not written."""

COMBINE = (
    """
    const int d = int(thread_position_in_grid.x);
    const int head = int(thread_position_in_grid.y);
    const int row = int(thread_position_in_grid.z);
"""
    + _SPAN
    + """
    const int parts = (length - oldest + PART - 1) / PART;
    const int64_t first = int64_t(row * HEADS + head) * part_tops_shape[2];
    float highest = part_tops[first];
    for (int p = 1; p < parts; ++p) {
        highest = metal::max(highest, part_tops[first + p]);
    }
    float value = 0.0f;
    float total = 0.0f;
    for (int p = 0; p < parts; ++p) {
        const float weight = metal::exp2(part_tops[first + p] - highest);
        value += weight * part_values[(first + p) * HEAD_DIM + d];
        total += weight * part_sums[first + p];
    }
    out[(row * HEADS + head) * HEAD_DIM + d] = T(value / total);
"""
)
"""Combines the parts of each row, one thread per element. In: the outputs of PARTS, and seq_lens.
Out: as DECODE."""
