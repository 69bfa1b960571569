#include <algorithm>
#include <limits>
#include <vector>

#include "operations.h"

namespace sgl::SGL_ISA {

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The `count` first of `size` numbers, the largest first, of equal ones the first.
void first_of(const float* sums, int64_t size, int64_t count, std::vector<int32_t>& chosen) {
    chosen.resize(size);
    for (int64_t at = 0; at < size; ++at) chosen[at] = static_cast<int32_t>(at);
    auto is_before = [sums](int32_t a, int32_t b) { return sums[a] > sums[b] || (sums[a] == sums[b] && a < b); };
    std::partial_sort(chosen.begin(), chosen.begin() + count, chosen.end(), is_before);
}

}  // namespace

void tree_expand(const TreeExpandArgs& args, Pool& pool) {
    const auto *parents = static_cast<const int32_t*>(args.parents), first = static_cast<int32_t>(args.first);
    const auto* chances = static_cast<const float*>(args.chances);
    auto *records = static_cast<int32_t*>(args.records), *beams = static_cast<int32_t*>(args.beams);
    auto *sums = static_cast<float*>(args.sums), *reached = static_cast<float*>(args.reached);
    int64_t width = args.width, every = args.requests * args.most, kept = args.requests * width;
    each_row(pool, args.requests, 16 * args.leaders, [&](int64_t row, int) {
        int32_t *token = records + row * args.most + first, *parent = token + every;
        float* sum = sums + row * args.most + first;
        int64_t beam = row * (args.leaders / width);
        for (int64_t at = 0; at < args.leaders; ++at) {
            int64_t own = beam + at / width;
            token[at] = row_of<int32_t>(args.tokens, own, args.tokens_stride)[at % width];
            sum[at] = row_of<float>(args.scores, own, args.scores_stride)[at % width] + (chances ? chances[own] : 0.0F);
            parent[at] = parents ? parents[own] : -1;
        }
        static thread_local std::vector<int32_t> chosen;
        first_of(sum, args.leaders, width, chosen);
        for (int64_t rank = 0; rank < width; ++rank) {
            int64_t made = row * width + rank;
            beams[made] = token[chosen[rank]];
            beams[kept + made] = static_cast<int32_t>(chosen[rank] / width);
            beams[2 * kept + made] = chosen[rank] + first;
            reached[made] = sum[chosen[rank]];
        }
    });
}

void tree_build(const TreeBuildArgs& args, Pool& pool) {
    const auto *records = static_cast<const int32_t*>(args.records), *depths = static_cast<const int32_t*>(args.depths);
    const auto* sums = static_cast<const float*>(args.sums);
    auto* tree = static_cast<int32_t*>(args.tree);
    int64_t every = args.requests * args.most, made = args.requests * args.nodes;
    each_row(pool, args.requests, 16 * args.most, [&](int64_t row, int) {
        const int32_t *token = records + row * args.most, *parent = token + every;
        const float* sum = sums + row * args.most;
        int32_t* tokens = tree + row * args.nodes;
        static thread_local std::vector<int32_t> chosen;
        first_of(sum, args.most, args.nodes, chosen);
        auto end = chosen.begin() + args.nodes;
        std::sort(chosen.begin(), end);
        for (int64_t node = 0; node < args.nodes; ++node) {
            int32_t own = chosen[node];
            tokens[node] = sum[own] == NEVER ? -1 : token[own];
            // As many nodes come up to the parent's record, that being kept.
            tokens[made + node] = static_cast<int32_t>(std::upper_bound(chosen.begin(), end, parent[own]) - chosen.begin());
            tokens[2 * made + node] = depths[own];
        }
    });
}

void tree_place(const TreePlaceArgs& args, Pool& pool) {
    const auto* slots = static_cast<const int32_t*>(args.slots);
    auto* trees = static_cast<int32_t*>(args.trees);
    each_row(pool, args.requests, 16 * args.nodes, [&](int64_t row, int) {
        const int32_t* tokens = row_of<int32_t>(args.tokens, row, args.tokens_stride);
        const int32_t* parents = row_of<int32_t>(args.parents, row, args.parents_stride);
        const int32_t* depths = row_of<int32_t>(args.depths, row, args.depths_stride);
        int32_t *before = trees + slots[row] * args.nodes, *shifts = before + args.table;
        int32_t *ancestors = shifts + args.table, *words = ancestors + args.table;
        auto* proposed = static_cast<int32_t*>(args.proposals) + slots[row] * (args.nodes - 1);
        for (int64_t node = 0; node < args.nodes; ++node) {
            before[node] = node ? parents[node - 1] : 0;
            shifts[node] = static_cast<int32_t>((node ? depths[node - 1] : 0) - node);
            auto own = uint32_t{1} << node, way = own | (node ? static_cast<uint32_t>(ancestors[before[node]]) : 0);
            ancestors[node] = static_cast<int32_t>(way);
            words[node] = static_cast<int32_t>(way << (31 - node) | ((uint32_t{1} << (31 - node)) - 1));
            if (node) proposed[node - 1] = tokens[node - 1];
        }
    });
}

}  // namespace sgl::SGL_ISA
