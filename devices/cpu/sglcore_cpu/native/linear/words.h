// Activations as the innermost loops read them: for each block of tokens the words [step][tokens], one stream from
// first to last.
#pragma once

#include <type_traits>

#include "micro.h"

namespace sgl::SGL_ISA {

// Tokens in blocks of `size`, the last one of what is left.
struct TokenBlocks {
    int64_t tokens, size, count;

    explicit TokenBlocks(int64_t all) : tokens(all) {
        count = ceil_div(all, kMostTokens);
        size = ceil_div(all, count);
        count = ceil_div(all, size);
    }
    int64_t first(int64_t block) const { return least(block * size, tokens); }
    int64_t length(int64_t block) const { return first(block + 1) - first(block); }
};

// Words [begin, end) of one token's row, every `apart` words from `to` on; those past the inputs are zero.
template <class Scheme>
SGL_INLINE void write_row(const char* row, int64_t inputs, int64_t begin, int64_t end, int64_t apart, uint32_t* to) {
    int64_t step = begin;
    if constexpr (std::is_same_v<Scheme, Pairs>) {
        for (; step < least(end, inputs / 2); ++step, to += apart) std::memcpy(to, row + step * 4, 4);
        if (step < end && step * 2 + 1 == inputs) {
            *to = reinterpret_cast<const bf16*>(row)[step * 2];
            to += apart, ++step;
        }
    } else if constexpr (std::is_same_v<Scheme, Widened>) {
        const auto* x = reinterpret_cast<const bf16*>(row);
        for (; step < least(end, inputs); ++step, to += apart) *to = static_cast<uint32_t>(x[step]) << 16;
    } else {
        for (; step < least(end, inputs); ++step, to += apart) std::memcpy(to, row + step * 4, 4);
    }
    for (; step < end; ++step, to += apart) *to = 0;
}

// Words of tokens [first, first + count) to `to`, `steps` for each, in parts whose lines stay in the nearest cache.
template <class Scheme>
void write_words(const Product& product, int64_t first, int64_t count, int64_t steps, uint32_t* to) {
    constexpr int64_t part = 256;
    for (int64_t begin = 0; begin < steps; begin += part) {
        int64_t end = least(begin + part, steps);
        for (int64_t r = 0; r < count; ++r)
            write_row<Scheme>(product.row(first + r), product.in_features, begin, end, count, to + begin * count + r);
    }
}

// Words of `count` blocks from `first` on, by all threads where there are many.
template <class Scheme>
void write_blocks(
    const Product& product, const TokenBlocks& blocks, int64_t first, int64_t count, uint32_t* words, Pool& pool) {
    constexpr int64_t alone = 16 << 10;  // words that take one thread less time than waking another
    int64_t steps = product.lines * Scheme::parts, origin = blocks.first(first);
    int64_t grain = most(1, alone / most(1, steps * blocks.size));
    pool.run(count, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t block = first + begin; block < first + end; ++block) {
            int64_t token = blocks.first(block);
            write_words<Scheme>(product, token, blocks.length(block), steps, words + (token - origin) * steps);
        }
    });
}

}  // namespace sgl::SGL_ISA
