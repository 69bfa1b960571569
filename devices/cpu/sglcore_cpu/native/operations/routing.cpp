// Which experts a token goes to, and with which weights.
#include <algorithm>

#include "elements.h"

// The k largest of softmax(logits), largest first, of equal ones the first; weights of `type`, ids i64.
#define SGL_ROUTING_ARGS(P, I, D) P(logits) I(stride) P(weights) P(ids) I(tokens) I(experts) I(k) I(normalize) I(type)
SGL_ARGS(RoutingArgs, SGL_ROUTING_ARGS)

// The same of scores + bias f32, scores being sigmoid(logits) for kind 0 and sqrt(softplus(logits)) for 1, in the top_groups of
// `groups` of neighbours whose two largest have the largest sums. Weights are scores, over their sum + eps if `normalize`,
// times scale.
#define SGL_SCORED_ROUTING_ARGS(P, I, D) \
    SGL_ROUTING_ARGS(P, I, D) P(bias) I(kind) I(groups) I(top_groups) D(eps) D(scale)
SGL_ARGS(ScoredRoutingArgs, SGL_SCORED_ROUTING_ARGS)

// The same weights of the experts chosen[ids[t]] [k] i32.
#define SGL_HASH_ROUTING_ARGS(P, I, D) \
    SGL_ROUTING_ARGS(P, I, D) P(input_ids) I(input_bytes) P(chosen) D(eps) D(scale)
SGL_ARGS(HashRoutingArgs, SGL_HASH_ROUTING_ARGS)

namespace sgl::SGL_ISA {

namespace {

enum Kind : int64_t { kSigmoid = 0, kRoot = 1 };

struct Choice {
    float logit;
    int64_t expert;
};

// Largest first, of equal ones the first. Returns the largest logit, NaN if one is.
template <class T>
float choose(const T* logits, int64_t experts, int64_t k, Choice* best) {
    int64_t count = 0;
    bool has_nan = false;
    for (int64_t expert = 0; expert < experts; ++expert) {
        float logit = as_float(logits[expert]);
        if (logit != logit) has_nan = true, logit = -INFINITY;
        if (count == k && !(logit > best[k - 1].logit)) continue;
        int64_t place = count < k ? count++ : k - 1;
        for (; place > 0 && logit > best[place - 1].logit; --place) best[place] = best[place - 1];
        best[place] = {logit, expert};
    }
    return has_nan ? NAN : best[0].logit;
}

template <class T>
float sum_of_exp(const T* logits, int64_t experts, float most) {
    f32x16 sum = zero();
    int64_t i = 0;
    for (; i + 16 <= experts; i += 16) sum = add(sum, exp(sub(load16(logits + i), set1(most))));
    float total = reduce_add(sum);
    for (; i < experts; ++i) total += std::exp(as_float(logits[i]) - most);
    return total;
}

template <class T>
void route_token(const RoutingArgs& args, int64_t token, Choice* best) {
    const T* logits = row_of<T>(args.logits, token, args.stride);
    T* weights = row_of<T>(args.weights, token, args.k);
    int64_t* ids = row_of<int64_t>(args.ids, token, args.k);
    float most = choose(logits, args.experts, args.k, best);
    float total = sum_of_exp(logits, args.experts, most), chosen = 0;
    for (int64_t i = 0; i < args.k; ++i) {
        best[i].logit = std::exp(best[i].logit - most) / total;
        chosen += best[i].logit;
    }
    for (int64_t i = 0; i < args.k; ++i) {
        assign(weights + i, args.normalize ? best[i].logit / chosen : best[i].logit);
        ids[i] = best[i].expert;
    }
}

// sqrt(log(1 + e^x)), the logarithm by the series of atanh, whose argument is at most a third.
SGL_INLINE f32x16 root_of_softplus(f32x16 x) {
    f32x16 y = exp(sub(zero(), max(x, sub(zero(), x)))), t = div(y, add(y, set1(2.0f))), square = mul(t, t);
    f32x16 sum = set1(1.0f / 15);
    for (int n = 13; n >= 1; n -= 2) sum = fma(sum, square, set1(1.0f / static_cast<float>(n)));
    alignas(64) float lanes[16];
    store(lanes, fma(mul(t, set1(2.0f)), sum, max(zero(), x)));
    for (float& lane : lanes) lane = std::sqrt(lane);
    return load(lanes);
}

// The scores of all experts, [experts] filled up to a multiple of 16.
template <class T>
void score(const T* logits, int64_t experts, int64_t kind, float* scores) {
    for (int64_t i = 0; i < experts; i += 16) {
        f32x16 x = get(logits + i, experts - i);
        store(scores + i, kind == kRoot ? root_of_softplus(x) : div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))));
    }
}

// The sum of a group's two largest, or its one.
float best_two(const float* scores, int64_t count) {
    float most = -INFINITY, next = -INFINITY;
    for (int64_t i = 0; i < count; ++i) {
        next = std::max(next, std::min(most, scores[i]));
        most = std::max(most, scores[i]);
    }
    return count > 1 ? most + next : most;
}

// Scores of all groups but the best become -infinity.
void keep_groups(float* scores, int64_t experts, int64_t groups, int64_t kept, float* sums, Choice* best) {
    int64_t size = experts / groups;
    for (int64_t group = 0; group < groups; ++group) sums[group] = best_two(scores + group * size, size);
    choose(sums, groups, kept, best);
    std::fill_n(sums, groups, -INFINITY);
    for (int64_t i = 0; i < kept; ++i) sums[best[i].expert] = 0.0f;
    for (int64_t i = 0; i < experts; ++i)
        if (sums[i / size] != 0.0f) scores[i] = -INFINITY;
}

// `best` have their scores: weights of these, and ids.
template <class T, class Args>
void weigh(const Args& args, int64_t token, const Choice* best) {
    float total = static_cast<float>(args.eps);
    for (int64_t i = 0; i < args.k; ++i) total += best[i].logit;
    if (!args.normalize) total = 1.0f;
    for (int64_t i = 0; i < args.k; ++i) {
        assign(row_of<T>(args.weights, token, args.k) + i, best[i].logit / total * static_cast<float>(args.scale));
        row_of<int64_t>(args.ids, token, args.k)[i] = best[i].expert;
    }
}

void top_k_routing(const RoutingArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        each_row(pool, args.tokens, 8 * args.experts, [&](int64_t token, int thread) {
            void* memory = pool.scratch(thread, static_cast<size_t>(args.k) * sizeof(Choice));
            route_token<decltype(element)>(args, token, static_cast<Choice*>(memory));
        });
    });
}

void scored_routing(const ScoredRoutingArgs& args, Pool& pool) {
    int64_t padded = (args.experts + 15) / 16 * 16, choices = std::max(args.k, args.top_groups);
    size_t floats = static_cast<size_t>(2 * padded + args.groups + 15) / 16 * 16;
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        each_row(pool, args.tokens, 16 * args.experts, [&](int64_t token, int thread) {
            auto* scores = static_cast<float*>(pool.scratch(thread, floats * 4 + static_cast<size_t>(choices) * sizeof(Choice)));
            float *biased = scores + padded, *sums = biased + padded;
            auto* best = reinterpret_cast<Choice*>(scores + floats);
            score(row_of<T>(args.logits, token, args.stride), args.experts, args.kind, scores);
            for (int64_t i = 0; i < args.experts; ++i) biased[i] = scores[i] + static_cast<const float*>(args.bias)[i];
            if (args.top_groups < args.groups) keep_groups(biased, args.experts, args.groups, args.top_groups, sums, best);
            choose(biased, args.experts, args.k, best);
            for (int64_t i = 0; i < args.k; ++i) best[i].logit = scores[best[i].expert];
            weigh<T>(args, token, best);
        });
    });
}

void hash_routing(const HashRoutingArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        each_row(pool, args.tokens, 64 * args.k, [&](int64_t token, int thread) {
            auto* best = static_cast<Choice*>(pool.scratch(thread, static_cast<size_t>(args.k) * sizeof(Choice)));
            int64_t id = index_at(args.input_ids, args.input_bytes, token);
            for (int64_t i = 0; i < args.k; ++i) {
                int64_t expert = row_of<int32_t>(args.chosen, id, args.k)[i];
                float x = as_float(row_of<T>(args.logits, token, args.stride)[expert]);
                best[i] = {std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)))), expert};
            }
            weigh<T>(args, token, best);
        });
    });
}

}  // namespace

SGL_KERNELS(operations_routing,
    SGL_KERNEL("top_k_routing", top_k_routing, RoutingArgs),
    SGL_KERNEL("scored_routing", scored_routing, ScoredRoutingArgs),
    SGL_KERNEL("hash_routing", hash_routing, HashRoutingArgs))

}  // namespace sgl::SGL_ISA
