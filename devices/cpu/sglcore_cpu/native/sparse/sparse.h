// Attention over rows that lists name, and what stands around it in a layer. What differs between steps (slots, positions,
// lengths, lists, tables) is read when a kernel runs, so that a recorded call serves other contents at the same addresses.
//
// Rows of a pool have `row_type` (f32, bf16 or f16, or codes, of which `exact` and `group` say what rows.h says) and lie
// `.._stride` elements (of codes: bytes) apart; row 0 is nobody's. Other elements have `type` (f32 or bf16) unless a comment says otherwise; indices, slots and positions are i32.
#pragma once

#include "../operations/elements.h"

// Where the first lens[t] rows of a token's request lie: row i is table[slot][i / page_rows] * page_rows + i % page_rows.
#define SGL_PAGED_ARGS(P, I) P(table) I(table_stride) P(token_slots) P(lens) I(page_rows)

namespace sgl::SGL_ISA {

SGL_INLINE int32_t i32_at(const void* values, int64_t i) { return static_cast<const int32_t*>(values)[i]; }

SGL_INLINE void put_index(void* indices, int64_t bytes, int64_t i, int64_t value) {
    if (bytes == 4) static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(value);
    else static_cast<int64_t*>(indices)[i] = value;
}

// The rows of one token's request.
struct Pages {
    const int32_t* pages;
    int64_t page_rows, count;

    template <class Args>
    Pages(const Args& args, int64_t token) : page_rows(args.page_rows) {
        pages = row_of<int32_t>(args.table, i32_at(args.token_slots, token), args.table_stride);
        count = i32_at(args.lens, token);
    }
    int64_t row(int64_t place) const { return pages[place / page_rows] * page_rows + place % page_rows; }
};

}  // namespace sgl::SGL_ISA
