#include "recurrent.h"

// S = exp(-exp(a_log) softplus(a + dt_bias)) S; S += k (sigmoid(b) (v - S^T k))^T; out = S^T q / sqrt(key). qkv has
// key_heads queries, as many keys, then heads values; states [.., heads, key, size], a_log and dt_bias [heads] f32.
#define SGL_DELTA_RULE_ARGS(P, I, D)                                                                             \
    P(qkv) I(qkv_stride) P(a) I(a_stride) P(b) I(b_stride) P(a_log) P(dt_bias) P(states) P(out) I(key_heads)     \
    I(heads) I(key) I(size) D(eps) SGL_ROWS_ARGS(P, I)
SGL_ARGS(DeltaRuleArgs, SGL_DELTA_RULE_ARGS)

namespace sgl::SGL_ISA {

namespace {

constexpr int kVectors = 4;
constexpr int64_t kColumns = 16 * kVectors;  // their part of a state stays in the nearest cache while a row's tokens pass
constexpr int64_t kFew = 4;                  // tokens for which that part is not brought together

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, count * sizeof(float));
}

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

// The first `left` lanes, all sixteen where a block of columns is full.
template <bool kFull>
SGL_INLINE f32x16 columns(const float* p, int64_t left) {
    return kFull ? load(p) : get(p, left);
}

// One token over the `parts` <= kVectors vectors of up to kColumns columns of a state whose key rows
// lie `stride` apart. With S' = decay S and
// u = beta (v - S'^T k): S = S' + k u^T and S^T q = S'^T q + (k q) u, so that one pass reads and one writes.
template <bool kFull, class T>
SGL_INLINE void step(const Head<T>& head, const T* values, float* state, int64_t stride, T* out, int64_t count) {
    int64_t key = head.args.key;
    const int parts = kFull ? kVectors : static_cast<int>((count + 15) / 16);
    f32x16 known[kVectors], seen[kVectors], products = zero();
    for (int part = 0; part < kVectors; ++part) known[part] = seen[part] = zero();
    for (int64_t i = 0; i < key; i += 16) products = fma(get(head.q + i, key - i), get(head.k + i, key - i), products);
    for (int64_t i = 0; i < key; ++i) {
        f32x16 k = set1(head.k[i]), q = set1(head.q[i]);
        for (int part = 0; part < parts; ++part) {
            f32x16 held = columns<kFull>(state + i * stride + 16 * part, count - 16 * part);
            known[part] = fma(k, held, known[part]);
            seen[part] = fma(q, held, seen[part]);
        }
    }
    f32x16 decay = set1(head.decay), beta = set1(head.beta), together = set1(reduce_add(products));
    for (int part = 0; part < parts; ++part) {
        int64_t left = count - 16 * part;
        known[part] = mul(beta, sub(get(values + 16 * part, left), mul(decay, known[part])));
        put(out + 16 * part, fma(together, known[part], mul(decay, seen[part])), left);
    }
    for (int64_t i = 0; i < key; ++i) {
        f32x16 k = set1(head.k[i]);
        for (int part = 0; part < parts; ++part) {
            float* place = state + i * stride + 16 * part;
            int64_t left = count - 16 * part;
            f32x16 held = fma(k, known[part], mul(decay, columns<kFull>(place, left)));
            kFull ? store(place, held) : put(place, held, left);
        }
    }
}

// Floor of a step: each state read and written once, 8 * heads * key * size bytes a row.
void gated_delta_rule(const DeltaRuleArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        int64_t parts = args.heads * ((args.size + kColumns - 1) / kColumns), of_head = parts / args.heads;
        int64_t work = 4 * args.key * kColumns, width = args.heads * args.size;
        each_part<T>(pool, args, parts, work, width, [&](const Row& row, int64_t part, int thread) {
            auto* own = static_cast<float*>(pool.scratch(thread, (2 + kColumns) * args.key * sizeof(float)));
            Head<T> head{args, part / of_head, own, own + args.key, 0.0f, 0.0f};
            int64_t column = part % of_head * kColumns, count = std::min(kColumns, args.size - column);
            auto state_of = [&](int64_t slot) {
                return static_cast<float*>(args.states) + (slot * args.heads + head.head) * args.key * args.size + column;
            };
            bool is_apart = row.last - row.first > kFew || row.target != row.slot;
            float* state = is_apart ? own + 2 * args.key : state_of(row.slot);
            int64_t stride = is_apart ? kColumns : args.size;
            if (is_apart) copy_rows(state_of(row.slot), args.size, state, stride, args.key, count);
            for (int64_t token = row.first; token < row.last; ++token) {
                head.read(token);
                T* out = row_of<T>(args.out, token, width) + head.head * args.size + column;
                const T* values = head.values(token) + column;
                if (count == kColumns) step<true>(head, values, state, stride, out, count);
                else step<false>(head, values, state, stride, out, count);
            }
            if (is_apart && row.target) copy_rows(state, stride, state_of(row.target), args.size, args.key, count);
        });
    });
}

}  // namespace

SGL_KERNELS(recurrent_delta_rule,
    SGL_KERNEL("gated_delta_rule", gated_delta_rule, DeltaRuleArgs))

}  // namespace sgl::SGL_ISA
