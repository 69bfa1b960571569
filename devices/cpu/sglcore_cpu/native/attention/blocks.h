// A block of keys, its values, and queries as words, for the products.
#pragma once

#include "cells.h"
#include "products.h"
#include "transpose.h"

namespace sgl::SGL_ISA {

// Of a block; blocks begin at its multiples, so that no sum depends on where a work item begins or ends.
constexpr int64_t kKeys = 96;

// Sixteen elements of a head from `at` on; zero from `dim` on.
SGL_INLINE f32x16 sixteen(const char* head, int64_t kind, int64_t at, int64_t dim) {
    int64_t n = std::min<int64_t>(16, dim - at);
    if (n <= 0) return zero();
    if (kind == kF32) {
        const auto* from = reinterpret_cast<const float*>(head) + at;
        return n == 16 ? load(from) : load_first(from, n);
    }
    if (kind == kBF16) {
        const auto* from = reinterpret_cast<const bf16*>(head) + at;
        return n == 16 ? load_bf16(from) : load_bf16_first(from, n);
    }
    f32x16 codes = load_i8_first(reinterpret_cast<const int8_t*>(head) + at, n);
    return mul(codes, set1(Element<kI8>::scale(head, dim)));
}

// A head as a row of `padded` (a multiple of 16) floats or bf16.
inline void copy_head(const char* head, int64_t kind, int64_t dim, int64_t padded, float* to) {
    for (int64_t i = 0; i < padded; i += 16) store(to + i, sixteen(head, kind, i, dim));
}
inline void copy_head(const char* head, int64_t kind, int64_t dim, int64_t padded, bf16* to) {
    if (kind == kBF16) {
        std::memcpy(to, head, static_cast<size_t>(dim) * 2);
        std::memset(to + dim, 0, static_cast<size_t>(padded - dim) * 2);
        return;
    }
    for (int64_t i = 0; i < padded; i += 16) store_bf16(to + i, sixteen(head, kind, i, dim));
}

template <class Words>
using Plain = std::conditional_t<Words::per_word == 1, float, bf16>;

// Which keys a block holds: places [from, to) of it, at `cells`; the others of its `padded` places are zero.
struct Span {
    const int64_t* cells;
    int64_t from, to, padded;
};

// Words of a block: keys [kKeys][padded dim] and as many values, in the orders that the products want.
template <class Words>
class KeyBlock {
  public:
    KeyBlock(uint32_t* memory, int64_t dim)
        : dim_(dim), padded_(padded_dim(dim)), keys_(memory), values_(keys_ + kKeys * padded_ / Words::per_word),
          turned_(values_ + kKeys * padded_ / Words::per_word) {}

    static int64_t padded_dim(int64_t dim) { return rounded_up(dim, Words::depth_unit == 1 ? 16 : 32); }
    static int64_t words(int64_t dim) { return 3 * kKeys * padded_dim(dim) / Words::per_word; }

    // `keys` and `values` are the cells' bases at the head.
    void fill(const Span& span, const Cells& keys, const Cells& values, int64_t head, int64_t kind) {
        for (int64_t i = 0; i < span.padded; ++i) {
            fetch(span, i + 8, keys, head);
            copy(span, i, keys, head, kind, plain(keys_) + i * padded_);
        }
        for (int64_t i = 0; i < span.padded; i += Words::per_word) {
            fetch(span, i + 8, values, head);
            fill_values(span, i, values, head, kind);
        }
        count_ = span.padded / Words::per_word;
        if (Words::depth_unit > 1)
            for (int64_t k = 0; k < count_; k += 16)
                for (int64_t d = 0; d < padded_; d += 16)
                    transpose(values_ + k * padded_ + d, padded_, turned_ + d * kKeys / 2 + k, kKeys / 2);
    }

    Left keys() const {
        int64_t depth = padded_ / Words::per_word;
        return {keys_, count_ * Words::per_word, depth, depth, 1};
    }
    Left values() const {
        if (Words::depth_unit > 1) return {turned_, padded_, count_, kKeys / 2, 1};
        return {values_, padded_, count_, 1, padded_};
    }

  private:
    static Plain<Words>* plain(uint32_t* words) { return reinterpret_cast<Plain<Words>*>(words); }

    void fetch(const Span& span, int64_t i, const Cells& cells, int64_t head) const {
        if (i < span.from || i >= span.to) return;
        const char* from = cells.base + span.cells[i - span.from] * cells.cell_bytes + head * cells.head_bytes;
        for (int64_t at = 0; at < cells.head_bytes; at += kLine) __builtin_prefetch(from + at);
    }

    void copy(const Span& span, int64_t i, const Cells& cells, int64_t head, int64_t kind, Plain<Words>* to) const {
        if (i < span.from || i >= span.to) {
            std::fill(to, to + padded_, Plain<Words>{0});
            return;
        }
        const char* from = cells.base + span.cells[i - span.from] * cells.cell_bytes + head * cells.head_bytes;
        copy_head(from, kind, dim_, padded_, to);
    }

    // One key's values as floats, or those of two keys element by element as pairs.
    void fill_values(const Span& span, int64_t i, const Cells& cells, int64_t head, int64_t kind) const {
        uint32_t* to = values_ + i / Words::per_word * padded_;
        if constexpr (Words::per_word == 1) {
            copy(span, i, cells, head, kind, plain(to));
        } else {
            bf16 *even = plain(turned_), *odd = even + padded_;  // not in use yet
            copy(span, i, cells, head, kind, even);
            copy(span, i + 1, cells, head, kind, odd);
            for (int64_t d = 0; d < padded_; ++d) to[d] = even[d] | static_cast<uint32_t>(odd[d]) << 16;
        }
    }

    int64_t dim_, padded_, count_ = 0;
    uint32_t *keys_, *values_, *turned_;
};

// Sixteen rows [16][depth] of words, depth a multiple of 16, as a panel [depth][16].
inline void turn_panel(const uint32_t* rows, int64_t depth, uint32_t* panel) {
    for (int64_t k = 0; k < depth; k += 16) transpose(rows + k, depth, panel + k * kPanel, kPanel);
}

}  // namespace sgl::SGL_ISA
