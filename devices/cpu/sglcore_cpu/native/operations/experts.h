// Which token goes to which expert, and the memory between the steps of a mixture of experts.
#pragma once

#include <algorithm>

#include "elements.h"

// out[t] = the sum over k of weights[t, k] * (w2[e] activation(w13[e] hidden[t] + b13[e]) + b2[e]), e = ids[t, k], none where
// that is -1. Form 0: silu_and_mul, gates at most `limit`, and what they open within it. Form 1: gates and what they open
// take turns, and are held and bent as the table's `clamped_moe` says. Form 2: max(x, 0)^2. Biases may be null but for form 1.
// w13 [experts, 2 * inner (form 2: inner), hidden_size], w2 [experts, hidden_size, inner], weights and ids [tokens, choices],
// contiguous.
#define SGL_MOE_ARGS(P, I, D)                                                                                   \
    P(hidden) I(hidden_stride) P(weights) P(ids) I(ids_bytes) P(w13) P(b13) P(w2) P(b2) P(out) I(tokens) I(choices) \
    I(experts) I(hidden_size) I(inner) I(type) I(form) D(alpha) D(limit)
SGL_ARGS(MoeArgs, SGL_MOE_ARGS)

namespace sgl::SGL_ISA {

// The choices of all tokens, grouped by expert; an entry is one choice, by ascending expert, then token.
struct Plan {
    int64_t* starts;         // [experts + 1]: the first entry of each
    int64_t* active;         // [experts]: those with entries
    int64_t* entry_choices;  // [tokens * choices]: token * choices + choice of each entry
    int64_t* token_entries;  // [tokens * choices]: each token's entries, ascending
    int64_t* token_counts;   // [tokens]
    int64_t num_active = 0;

    static int64_t words(const MoeArgs& args) {
        return 2 * args.experts + 1 + 2 * args.tokens * args.choices + args.tokens;
    }

    Plan(const MoeArgs& args, void* memory) {
        int64_t choices = args.tokens * args.choices;
        starts = static_cast<int64_t*>(memory);
        active = starts + args.experts + 1;
        entry_choices = active + args.experts;
        token_entries = entry_choices + choices;
        token_counts = token_entries + choices;
        count(args, choices);
        place(args, choices);
    }

    int64_t begin(int64_t place) const { return starts[active[place]]; }
    int64_t end(int64_t place) const { return starts[active[place] + 1]; }

  private:
    void count(const MoeArgs& args, int64_t choices) {
        std::fill_n(starts, args.experts + 1, 0);
        for (int64_t i = 0; i < choices; ++i) {
            int64_t expert = index_at(args.ids, args.ids_bytes, i);
            if (expert >= 0) ++starts[expert + 1];
        }
        for (int64_t expert = 0; expert < args.experts; ++expert) {
            if (starts[expert + 1] != 0) active[num_active++] = expert;
            starts[expert + 1] += starts[expert];
        }
    }

    void place(const MoeArgs& args, int64_t choices) {
        for (int64_t i = 0; i < choices; ++i) {
            int64_t expert = index_at(args.ids, args.ids_bytes, i);
            if (expert >= 0) entry_choices[starts[expert]++] = i;
        }
        // Each start has moved to its end, which is the next one's start.
        for (int64_t expert = args.experts; expert > 0; --expert) starts[expert] = starts[expert - 1];
        starts[0] = 0;
        std::fill_n(token_counts, args.tokens, 0);
        for (int64_t entry = 0; entry < starts[args.experts]; ++entry) {
            int64_t token = entry_choices[entry] / args.choices;
            token_entries[token * args.choices + token_counts[token]++] = entry;
        }
    }
};

}  // namespace sgl::SGL_ISA
