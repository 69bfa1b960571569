#include "recurrent.h"

namespace sgl::SGL_ISA {

namespace {

constexpr int64_t kColumns = 32;  // their part of a state stays in the nearest cache while a row's tokens pass

// What a head's tokens bring, widened; q and k of unit length.
template <class T>
struct Head {
    const DeltaRuleArgs& args;
    int64_t head;
    float* q;
    float* k;
    float decay, beta;

    void read(int64_t token) {
        const T* row = row_of<T>(args.qkv, token, args.qkv_stride) + head / (args.heads / args.key_heads) * args.key;
        unit(row, q, 1.0f / std::sqrt(static_cast<float>(args.key)));
        unit(row + args.key_heads * args.key, k, 1.0f);
        float wide = widened(row_of<T>(args.a, token, args.a_stride)[head]) + static_cast<const float*>(args.dt_bias)[head];
        decay = std::exp(-std::exp(static_cast<const float*>(args.a_log)[head]) * softplus(wide));
        float strength = 1.0f / (1.0f + std::exp(-widened(row_of<T>(args.b, token, args.b_stride)[head])));
        beta = sizeof(T) == 2 ? from_bf16(to_bf16(strength)) : strength;
    }
    const T* values(int64_t token) const {
        return row_of<T>(args.qkv, token, args.qkv_stride) + 2 * args.key_heads * args.key + head * args.size;
    }

  private:
    void unit(const T* from, float* to, float scale) const {
        f32x16 sum = zero();
        for (int64_t i = 0; i < args.key; i += 16) {
            f32x16 x = get(from + i, args.key - i);
            sum = fma(x, x, sum);
        }
        f32x16 factor = set1(scale / std::sqrt(reduce_add(sum) + static_cast<float>(args.eps)));
        for (int64_t i = 0; i < args.key; i += 16) put(to + i, mul(get(from + i, args.key - i), factor), args.key - i);
    }
};

// One token over up to kColumns columns of a state [key, size]. With S' = decay S and u = beta (v - S'^T k):
// S = S' + k u^T and S^T q = S'^T q + (k q) u, so that one pass reads and one writes.
template <class T>
void step(const Head<T>& head, const T* values, float* state, T* out, int64_t count) {
    int64_t key = head.args.key, size = head.args.size, second = count - 16;
    f32x16 known[2] = {zero(), zero()}, seen[2] = {zero(), zero()};
    f32x16 products = zero();
    for (int64_t i = 0; i < key; i += 16) products = fma(get(head.q + i, key - i), get(head.k + i, key - i), products);
    bool is_wide = second > 0;
    for (int64_t i = 0; i < key; ++i) {
        f32x16 k = set1(head.k[i]), q = set1(head.q[i]);
        f32x16 held = get(state + i * size, count);
        known[0] = fma(k, held, known[0]);
        seen[0] = fma(q, held, seen[0]);
        if (!is_wide) continue;
        held = get(state + i * size + 16, second);
        known[1] = fma(k, held, known[1]);
        seen[1] = fma(q, held, seen[1]);
    }
    f32x16 decay = set1(head.decay), beta = set1(head.beta), together = set1(reduce_add(products));
    f32x16 update[2];
    for (int64_t part = 0; part <= is_wide; ++part) {
        int64_t left = count - 16 * part;
        update[part] = mul(beta, sub(get(values + 16 * part, left), mul(decay, known[part])));
        put(out + 16 * part, fma(together, update[part], mul(decay, seen[part])), left);
    }
    for (int64_t i = 0; i < key; ++i) {
        f32x16 k = set1(head.k[i]);
        float* row = state + i * size;
        put(row, fma(k, update[0], mul(decay, get(row, count))), count);
        if (is_wide) put(row + 16, fma(k, update[1], mul(decay, get(row + 16, second))), second);
    }
}

}  // namespace

// Floor of a step: each state read and written once, 8 * heads * key * size bytes a row.
void gated_delta_rule(const DeltaRuleArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        int64_t parts = args.heads * ((args.size + kColumns - 1) / kColumns), of_head = parts / args.heads;
        int64_t work = 4 * args.key * kColumns, width = args.heads * args.size;
        each_part<T>(pool, args, parts, work, width, [&](const Row& row, int64_t part, int thread) {
            auto* own = static_cast<float*>(pool.scratch(thread, 2 * args.key * sizeof(float)));
            Head<T> head{args, part / of_head, own, own + args.key, 0.0f, 0.0f};
            int64_t column = part % of_head * kColumns, count = std::min(kColumns, args.size - column);
            float* state = static_cast<float*>(args.states) + (row.slot * args.heads + head.head) * args.key * args.size;
            for (int64_t token = row.first; token < row.last; ++token) {
                head.read(token);
                T* out = row_of<T>(args.out, token, width) + head.head * args.size + column;
                step(head, head.values(token) + column, state + column, out, count);
            }
        });
    });
}

}  // namespace sgl::SGL_ISA
