#include <algorithm>

#include "elements.h"

// As the table's entries of these names say; all arrays are int32, a row of proposals has proposals_stride of them.
#define SGL_PLACE_PROPOSALS_ARGS(P, I, D)                                                                               \
    P(last) P(lengths) P(proposals) I(proposals_stride) P(slots) P(limits) P(nodes) P(ids) P(positions) P(seq_lens) P(owners) \
    I(requests) I(width)
SGL_ARGS(PlaceProposalsArgs, SGL_PLACE_PROPOSALS_ARGS)
#define SGL_ACCEPT_PROPOSALS_ARGS(P, I, D)                                                                        \
    P(drawn) P(owners) P(slots) P(limits) P(last) P(lengths) P(proposals) I(proposals_stride) P(runs) I(requests) I(width)
SGL_ARGS(AcceptProposalsArgs, SGL_ACCEPT_PROPOSALS_ARGS)

namespace sgl::SGL_ISA {

namespace {

void place_proposals(const PlaceProposalsArgs& args, Pool& pool) {
    const auto *last = static_cast<const int32_t*>(args.last), *lengths = static_cast<const int32_t*>(args.lengths);
    const auto *slots = static_cast<const int32_t*>(args.slots), *limits = static_cast<const int32_t*>(args.limits);
    const auto* nodes = static_cast<const int32_t*>(args.nodes);
    auto *ids = static_cast<int32_t*>(args.ids), *positions = static_cast<int32_t*>(args.positions);
    auto *seq_lens = static_cast<int32_t*>(args.seq_lens), *owners = static_cast<int32_t*>(args.owners);
    each_row(pool, args.requests, 8 * args.width, [&](int64_t row, int) {
        int32_t slot = slots[row], length = lengths[slot];
        const int32_t* proposed = row_of<int32_t>(args.proposals, slot, args.proposals_stride);
        for (int64_t node = 0; node < args.width; ++node) {
            bool usable = length + node < limits[row] && (!nodes || node < nodes[row]);
            int64_t token = row * args.width + node;
            auto position = static_cast<int32_t>(usable ? length + node : 0);
            positions[token] = position;
            seq_lens[token] = position + 1;
            owners[token] = usable ? slot : 0;
            ids[token] = node ? std::max(proposed[node - 1], 0) : last[slot];
        }
    });
}

void accept_proposals(const AcceptProposalsArgs& args, Pool& pool) {
    const auto *drawn = static_cast<const int32_t*>(args.drawn), *owners = static_cast<const int32_t*>(args.owners);
    const auto *slots = static_cast<const int32_t*>(args.slots), *limits = static_cast<const int32_t*>(args.limits);
    auto *last = static_cast<int32_t*>(args.last), *lengths = static_cast<int32_t*>(args.lengths);
    auto* runs = static_cast<int32_t*>(args.runs);
    each_row(pool, args.requests, 8 * args.width, [&](int64_t row, int) {
        int32_t slot = slots[row], before = lengths[slot], proposals = 0;
        int64_t first = row * args.width, right = 0;
        const int32_t* proposed = row_of<int32_t>(args.proposals, slot, args.proposals_stride);
        for (int64_t node = 1; node < args.width; ++node) {
            bool usable = owners[first + node] != 0;
            proposals += usable && proposed[node - 1] >= 0;
            right += right == node - 1 && usable && drawn[first + node - 1] == proposed[node - 1];
        }
        auto accepted = static_cast<int32_t>(right);
        runs[row] = accepted;
        runs[args.requests + row] = proposals;
        runs[2 * args.requests + row] = static_cast<int32_t>(first + right);
        runs[3 * args.requests + row] = lengths[slot] = std::min(before + accepted + 1, std::max(limits[row], before));
        last[slot] = drawn[first + right];
    });
}

}  // namespace

SGL_KERNELS(operations_proposals,
    SGL_KERNEL("place_proposals", place_proposals, PlaceProposalsArgs),
    SGL_KERNEL("accept_proposals", accept_proposals, AcceptProposalsArgs))

}  // namespace sgl::SGL_ISA
