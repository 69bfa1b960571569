#include <algorithm>

#include "operations.h"

namespace sgl::SGL_ISA {

void embedding(const EmbeddingArgs& args, Pool& pool) {
    auto bytes = static_cast<size_t>(args.row_bytes);
    each_row(pool, args.rows, args.row_bytes / 2, [&](int64_t row, int) {
        int64_t id = index_at(args.ids, args.ids_bytes, row);
        std::memcpy(row_of<char>(args.out, row, args.row_bytes), row_of<char>(args.weight, id, args.weight_stride), bytes);
    });
}

void cache_locations(const CacheLocationsArgs& args, Pool& pool) {
    const auto* slots = static_cast<const int32_t*>(args.slots);
    const auto* positions = static_cast<const int32_t*>(args.positions);
    each_row(pool, args.tokens, 8, [&](int64_t token, int) {
        const int32_t* pages = row_of<int32_t>(args.page_table, slots[token], args.table_stride);
        int64_t page = pages[positions[token] / args.page_size], offset = positions[token] % args.page_size;
        int64_t cell = page * args.page_size + offset;
        if (args.out_bytes == 4)
            static_cast<int32_t*>(args.out)[token] = static_cast<int32_t>(cell);
        else
            static_cast<int64_t*>(args.out)[token] = cell;
    });
}

namespace {

float as_float(float x) { return x; }
float as_float(bf16 x) { return from_bf16(x); }
void assign(float* out, float x) { *out = x; }
void assign(bf16* out, float x) { *out = to_bf16(x); }

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

}  // namespace

void top_k_routing(const RoutingArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        each_row(pool, args.tokens, 8 * args.experts, [&](int64_t token, int thread) {
            void* memory = pool.scratch(thread, static_cast<size_t>(args.k) * sizeof(Choice));
            route_token<decltype(element)>(args, token, static_cast<Choice*>(memory));
        });
    });
}

}  // namespace sgl::SGL_ISA
