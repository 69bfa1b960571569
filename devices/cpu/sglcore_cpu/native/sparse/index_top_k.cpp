// The rows of the k largest scores, by a radix selection: eleven bits at a time decide, and only what they leave open goes on.
//
// Floor: the scores read once. They are read twice.
#include <algorithm>

#include "sparse.h"

// out [tokens, k]: the rows of the k largest of logits f32 [tokens, width] among the first lens[t], of equal ones the
// first, ascending by place; -1 behind them. NaN is the largest.
#define SGL_INDEX_TOP_K_ARGS(P, I, D) P(logits) I(logits_stride) P(out) I(tokens) I(width) I(k) SGL_PAGED_ARGS(P, I)
SGL_ARGS(IndexTopKArgs, SGL_INDEX_TOP_K_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int kBits = 11, kBuckets = 1 << kBits;
constexpr int kShifts[] = {21, 10, 0};  // the last of them has a bit in common with the one before

// Integers in the order of the scores; zeros of both signs are equal.
SGL_INLINE uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.0f;
    std::memcpy(&bits, &score, 4);
    if (score != score) return UINT32_MAX;
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

struct Least {
    uint32_t key;   // of the k-th largest
    int64_t equal;  // how many equal to it are wanted
};

// 0 < k <= count. `keys` [count] is memory.
Least kth(const float* scores, int64_t count, int64_t k, uint32_t* keys) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; ++i) keys[i] = ordered(scores[i]);
    for (int shift : kShifts) {
        uint32_t counts[kBuckets] = {};
        for (int64_t i = 0; i < count; ++i) ++counts[(keys[i] >> shift) & (kBuckets - 1)];
        uint32_t bucket = kBuckets - 1;
        for (; counts[bucket] < k; --bucket) k -= counts[bucket];
        found |= bucket << shift;
        int64_t left = 0;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t key = keys[i];
            keys[left] = key;
            left += ((key >> shift) & (kBuckets - 1)) == bucket;
        }
        count = left;
    }
    return {found, k};
}

// Places of what is not less, ascending, as many as wanted; one more is written.
void places(const float* scores, int64_t count, Least least, int32_t* to) {
    int64_t taken = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t key = ordered(scores[i]);
        bool is_equal = key == least.key;
        to[taken] = static_cast<int32_t>(i);
        taken += (key > least.key) | (is_equal & (least.equal > 0));
        least.equal -= is_equal;
    }
}

void index_top_k(const IndexTopKArgs& args, Pool& pool) {
    auto bytes = static_cast<size_t>(args.width + args.k + 1) * 4;
    each_row(pool, args.tokens, 4 * args.width, [&](int64_t token, int thread) {
        Pages rows(args, token);
        const float* scores = row_of<float>(args.logits, token, args.logits_stride);
        int32_t* out = row_of<int32_t>(args.out, token, args.k);
        int64_t count = std::min(rows.count, args.width), taken = std::min(count, args.k);
        if (count > args.k) {
            auto* keys = static_cast<uint32_t*>(pool.scratch(thread, bytes));
            auto* found = reinterpret_cast<int32_t*>(keys + args.width);
            places(scores, count, kth(scores, count, args.k, keys), found);
            for (int64_t i = 0; i < taken; ++i) out[i] = static_cast<int32_t>(rows.row(found[i]));
        } else {
            for (int64_t i = 0; i < taken; ++i) out[i] = static_cast<int32_t>(rows.row(i));
        }
        std::fill(out + std::max<int64_t>(taken, 0), out + args.k, -1);
    });
}

}  // namespace

SGL_KERNELS(sparse_index_top_k,
    SGL_KERNEL("index_top_k", index_top_k, IndexTopKArgs))

}  // namespace sgl::SGL_ISA
