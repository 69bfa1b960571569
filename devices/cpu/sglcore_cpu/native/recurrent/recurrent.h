// Layers with a state for each request: row r's is state slots[r] of a pool, read and written in place. Its tokens are
// [starts[r], starts[r] + lengths[r]), or token r alone where `starts` is null. Rows of slot 0 write no state; their
// tokens and nobody's give zeros. What a state becomes is written to targets[r], nowhere where that is 0. Inputs and results have `type` (f32 or bf16); strides are elements from row to row.
#pragma once

#include "../operations/elements.h"

#define SGL_ROWS_ARGS(P, I) P(slots) P(starts) P(lengths) P(targets) I(rows) I(tokens) I(type)

namespace sgl::SGL_ISA {

// The tokens of one row: none for padding.
struct Row {
    int64_t slot, first, last, target;
};

template <class Args>
Row row_at(const Args& args, int64_t row) {
    int64_t slot = static_cast<const int32_t*>(args.slots)[row];
    int64_t target = static_cast<const int32_t*>(args.targets)[row];
    if (!args.starts) return {slot, row, slot ? row + 1 : row, target};
    int64_t first = static_cast<const int32_t*>(args.starts)[row];
    return {slot, first, slot ? first + static_cast<const int32_t*>(args.lengths)[row] : first, target};
}

// body(row, part, thread) for every part of every row, by several threads; `work` is what one part of one token takes,
// in elements. Results [tokens, width] of T of tokens that no row has are 0 afterwards.
template <class T, class Args, class Body>
void each_part(Pool& pool, const Args& args, int64_t parts, int64_t work, int64_t width, Body&& body) {
    int64_t covered = 0;
    for (int64_t row = 0; row < args.rows; ++row) covered += row_at(args, row).last - row_at(args, row).first;
    if (covered < args.tokens) std::memset(args.out, 0, args.tokens * width * sizeof(T));
    if (!covered) return;
    int64_t each = work * covered / args.rows;
    pool.run(args.rows * parts, rows_of_part(each), [&](int64_t first, int64_t last, int thread) {
        for (int64_t i = first; i < last; ++i) {
            Row row = row_at(args, i / parts);
            if (row.last > row.first) body(row, i % parts, thread);
        }
    });
}

// log(1 + e^x).
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
float widened(T value) {
    if constexpr (sizeof(T) == 2) return from_bf16(value);
    return value;
}

}  // namespace sgl::SGL_ISA
