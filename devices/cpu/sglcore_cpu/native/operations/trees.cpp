#include <algorithm>
#include <limits>
#include <vector>

#include "elements.h"

// As the entries of these names in the table say. Scores, chances, sums and reached are f32, all else i32; a row of tokens and scores has `stride` of them, where
// `parents` and `chances` may be null. `leaders` are those of all beams of a request, `most` its records.
#define SGL_TREE_EXPAND_ARGS(P, I, D)                                                                                    \
    P(tokens) I(tokens_stride) P(scores) I(scores_stride) P(parents) P(chances) I(first) P(records) P(sums) P(beams) P(reached) \
    I(requests) I(leaders) I(width) I(most)
SGL_ARGS(TreeExpandArgs, SGL_TREE_EXPAND_ARGS)
#define SGL_TREE_BUILD_ARGS(P, I, D) P(records) P(sums) P(depths) P(tree) I(requests) I(most) I(nodes)
SGL_ARGS(TreeBuildArgs, SGL_TREE_BUILD_ARGS)
#define SGL_TREE_PLACE_ARGS(P, I, D)                                                                        \
    P(tokens) I(tokens_stride) P(parents) I(parents_stride) P(depths) I(depths_stride) P(slots) P(trees) I(table) \
    P(proposals) I(requests) I(nodes)
SGL_ARGS(TreePlaceArgs, SGL_TREE_PLACE_ARGS)
#define SGL_TREE_WALK_ARGS(P, I, D)                                                                           \
    P(drawn) P(owners) P(slots) P(limits) P(trees) I(table) I(most) P(last) P(lengths) P(proposals) I(proposals_stride) \
    P(path) P(runs) I(requests) I(width) I(steps)
SGL_ARGS(TreeWalkArgs, SGL_TREE_WALK_ARGS)

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

void tree_walk(const TreeWalkArgs& args, Pool& pool) {
    const auto *drawn = static_cast<const int32_t*>(args.drawn), *owners = static_cast<const int32_t*>(args.owners);
    const auto *slots = static_cast<const int32_t*>(args.slots), *limits = static_cast<const int32_t*>(args.limits);
    const auto* trees = static_cast<const int32_t*>(args.trees);
    auto *last = static_cast<int32_t*>(args.last), *lengths = static_cast<int32_t*>(args.lengths);
    auto *paths = static_cast<int32_t*>(args.path), *runs = static_cast<int32_t*>(args.runs);
    each_row(pool, args.requests, 16 * args.width, [&](int64_t row, int) {
        int32_t slot = slots[row], before = lengths[slot], proposals = 0, accepted = 0;
        const int32_t *token = drawn + row * args.width, *owner = owners + row * args.width;
        const int32_t *parents = trees + slot * args.most, *shifts = parents + args.table;
        const int32_t* proposed = row_of<int32_t>(args.proposals, slot, args.proposals_stride);
        int32_t* path = paths + row * args.steps;
        for (int64_t place = 0; place < args.steps; ++place) path[place] = static_cast<int32_t>(place);
        // A bit for each node that is right, as are all on the way to it.
        uint32_t right = 1;
        for (int64_t node = 1; node < args.width; ++node) {
            bool usable = owner[node] != 0;
            proposals += usable && proposed[node - 1] >= 0;
            if (!usable || !(right >> parents[node] & 1) || token[parents[node]] != proposed[node - 1]) continue;
            right |= uint32_t{1} << node;
            accepted = shifts[node] + static_cast<int32_t>(node);
            path[accepted] = static_cast<int32_t>(node);
        }
        runs[row] = accepted;
        runs[args.requests + row] = proposals;
        runs[2 * args.requests + row] = static_cast<int32_t>(row * args.steps + accepted);
        runs[3 * args.requests + row] = lengths[slot] = std::min(before + accepted + 1, std::max(limits[row], before));
        last[slot] = token[path[accepted]];
    });
}

}  // namespace

SGL_KERNELS(operations_trees,
    SGL_KERNEL("tree_expand", tree_expand, TreeExpandArgs),
    SGL_KERNEL("tree_build", tree_build, TreeBuildArgs),
    SGL_KERNEL("tree_place", tree_place, TreePlaceArgs),
    SGL_KERNEL("tree_walk", tree_walk, TreeWalkArgs))

}  // namespace sgl::SGL_ISA
