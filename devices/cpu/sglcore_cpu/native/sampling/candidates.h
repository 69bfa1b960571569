// The tokens that a cut-off looks at, in the order of their ids, and where in the order (gap, id) a prefix of them ends.
#pragma once

#include <algorithm>

#include "logits.h"

namespace sgl::SGL_ISA {

// Candidates are the tokens whose (gap, id) is at most this.
struct Cut {
    int32_t gap = kLimit - 1;
    int32_t id = INT32_MAX;

    bool keeps(int32_t other, int32_t other_id) const { return other < gap || (other == gap && other_id <= id); }
};

struct Candidate {
    int32_t gap, id;
};

constexpr int kBinBits = 11, kBins = (kLimit >> kBinBits) + 1, kSteps = 1 << kBinBits;

// Memory for one row; `items` has room for a whole block in each block.
struct RowMemory {
    float* most;      // [blocks]
    int32_t* counts;  // [blocks]
    int64_t* sums;    // [blocks]
    int64_t* bins;    // [max(kBins, kSteps)]
    Candidate* items;  // [blocks * kBlock]
    float* sorted;    // [blocks]

    static size_t bytes(int64_t blocks) {
        return static_cast<size_t>(blocks) * (4 + 4 + 4 + 8 + kBlock * sizeof(Candidate)) + kSteps * 8 + 64;
    }
    RowMemory(void* memory, int64_t blocks) {
        items = static_cast<Candidate*>(memory);
        sums = reinterpret_cast<int64_t*>(items + blocks * kBlock);
        bins = sums + blocks;
        most = reinterpret_cast<float*>(bins + kSteps);
        sorted = most + blocks;
        counts = reinterpret_cast<int32_t*>(sorted + blocks);
    }
};

// visit(candidate) over what was collected, ids ascending, until it returns false.
template <class Visit>
void each_candidate(const RowMemory& memory, int64_t blocks, Visit&& visit) {
    for (int64_t block = 0; block < blocks; ++block) {
        const Candidate* items = memory.items + block * kBlock;
        for (int32_t i = 0; i < memory.counts[block]; ++i)
            if (!visit(items[i])) return;
    }
}

// The first column whose running sum reaches `wanted`, else the last one; `before` grows by the sum before it.
inline int32_t first_reaching(const int64_t* sums, int32_t size, int64_t wanted, int64_t* before) {
    int32_t column = 0;
    while (column + 1 < size && *before + sums[column] < wanted) *before += sums[column++];
    return column;
}

// The prefix, in the order (gap, id), of the collected candidates within `cut` whose weights reach `wanted` > 0; weight
// (gap) is not negative. The cut stays as it is if they never do.
template <class Weight>
Cut prefix_end(const RowMemory& memory, int64_t blocks, Cut cut, int64_t wanted, Weight&& weight) {
    auto fill = [&](int32_t size, auto&& add) {
        std::fill_n(memory.bins, size, 0);
        each_candidate(memory, blocks, [&](Candidate item) {
            if (cut.keeps(item.gap, item.id)) add(item.gap);
            return true;
        });
    };
    int64_t before = 0;
    fill(kBins, [&](int32_t gap) { memory.bins[gap >> kBinBits] += weight(gap); });
    int32_t bin = first_reaching(memory.bins, kBins, wanted, &before);
    if (before + memory.bins[bin] < wanted) return cut;
    fill(kSteps, [&](int32_t gap) {
        if (gap >> kBinBits == bin) memory.bins[gap & (kSteps - 1)] += weight(gap);
    });
    int32_t gap = bin << kBinBits | first_reaching(memory.bins, kSteps, wanted, &before);
    int64_t each = std::max<int64_t>(weight(gap), 1), ties = (wanted - before + each - 1) / each;
    Cut found{gap, INT32_MAX};
    each_candidate(memory, blocks, [&](Candidate item) {
        if (item.gap == gap && --ties == 0) found.id = item.id;
        return ties > 0;
    });
    return found;
}

}  // namespace sgl::SGL_ISA
