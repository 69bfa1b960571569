// A product for each group. Floor: each weight read once.
#include <algorithm>

#include "../operations/dots.h"
#include "rows.h"

// out [tokens, groups, outputs] = weight[g] x[t, g]; weight elements at g * group_stride + output * output_stride + input *
// input_stride, one of the latter two being 1.
#define SGL_GROUPED_ARGS(P, I, D)                                                                                 \
    P(x) I(x_stride) I(x_group_stride) P(weight) I(group_stride) I(output_stride) I(input_stride) P(out)          \
    I(tokens) I(groups) I(outputs) I(inputs) I(type)
SGL_ARGS(GroupedArgs, SGL_GROUPED_ARGS)

namespace sgl::SGL_ISA {
namespace {

constexpr int64_t kRows = 64, kColumns = 256;  // outputs of one part of the work
constexpr int64_t kInputs = 64;   // of columns
constexpr int64_t kTokens = 64;   // that pass over them at a time: their weights then stay in the cache

template <class T>
struct Group {
    const GroupedArgs& args;
    int64_t group;

    const T* x(int64_t token) const { return row_of<T>(args.x, token, args.x_stride) + group * args.x_group_stride; }
    const T* weight() const { return row_of<T>(args.weight, group, args.group_stride); }
    T* out(int64_t token) const { return row_of<T>(args.out, token * args.groups + group, args.outputs); }
};

// Outputs [first, last), whose weights each lie side by side.
template <class T>
void by_rows(const Group<T>& group, int64_t first, int64_t last, int64_t token, int64_t count) {
    const T* vectors[kTokens];
    for (int64_t i = 0; i < count; ++i) vectors[i] = group.x(token + i);
    int64_t apart = group.args.output_stride;
    for (int64_t output = first; output < last; output += kBlock) {
        int64_t rows = std::min(kBlock, last - output);
        float sums[kTokens * kBlock];
        dot_all<T>({group.weight() + output * apart, group.args.inputs, apart, rows}, vectors, count, sums, kBlock);
        for (int64_t v = 0; v < count; ++v) put(group.out(token + v) + output, load(sums + v * kBlock), rows);
    }
}

// sums[v][output] += weight . x over the inputs [k, end), for V tokens and N vectors of outputs from `first` on, or `left` < 16
// outputs of one; the weights of an input lie side by side.
template <class T, int V, int N>
void add_inputs(const Group<T>& group, int64_t first, int64_t left, int64_t token, int64_t k, int64_t end, float* sums) {
    f32x16 sum[V][N];
    for (int v = 0; v < V; ++v)
        for (int i = 0; i < N; ++i) sum[v][i] = load(sums + v * kColumns + 16 * i);
    const T* x[V];
    for (int v = 0; v < V; ++v) x[v] = group.x(token + v);
    const T* weight = group.weight() + k * group.args.input_stride + first;
    for (; k < end; ++k, weight += group.args.input_stride)
        for (int i = 0; i < N; ++i) {
            f32x16 one = N == 1 ? get(weight, left) : load16(weight + 16 * i);
            for (int v = 0; v < V; ++v) sum[v][i] = fma(set1(as_float(x[v][k])), one, sum[v][i]);
        }
    for (int v = 0; v < V; ++v)
        for (int i = 0; i < N; ++i) store(sums + v * kColumns + 16 * i, sum[v][i]);
}

// V tokens, the outputs [first, last) by N vectors at a time and what is left one by one.
template <class T, int V, int N>
void add_tokens(const Group<T>& group, int64_t first, int64_t last, int64_t token, int64_t k, int64_t end, float* sums) {
    int64_t output = first;
    for (; output + 16 * N <= last; output += 16 * N)
        add_inputs<T, V, N>(group, output, 16, token, k, end, sums + output - first);
    for (; output < last; output += 16)
        add_inputs<T, V, 1>(group, output, last - output, token, k, end, sums + output - first);
}

// A block of inputs at a time, whose weights stay in the nearest cache while tokens pass. `sums` [count][kColumns].
template <class T>
void by_columns(const Group<T>& group, int64_t first, int64_t last, int64_t token, int64_t count, float* sums) {
    constexpr int kWide = SGL_LEVEL >= 3 ? 16 : 4, kNarrow = SGL_LEVEL >= 3 ? 4 : 2, kTogether = SGL_LEVEL >= 3 ? 4 : 2;
    std::fill_n(sums, count * kColumns, 0.0f);
    for (int64_t k = 0; k < group.args.inputs; k += kInputs) {
        int64_t end = std::min(k + kInputs, group.args.inputs), v = 0;
        for (; v + kTogether <= count; v += kTogether)
            add_tokens<T, kTogether, kNarrow>(group, first, last, token + v, k, end, sums + v * kColumns);
        for (; v < count; ++v) add_tokens<T, 1, kWide>(group, first, last, token + v, k, end, sums + v * kColumns);
    }
    for (int64_t v = 0; v < count; ++v)
        for (int64_t i = 0; i < last - first; i += 16)
            put(group.out(token + v) + first + i, load(sums + v * kColumns + i), last - first - i);
}

// Weights whose inputs lie side by side stand at the left of attention's product as they are, tokens at its right as panels.
template <class Words>
struct AsPanels {
    static constexpr int64_t kTokens = 96, kUnit = 32;

    static bool takes(const GroupedArgs& args) {
        return args.input_stride == 1 && args.output_stride % Words::per_word == 0 && args.tokens >= kPanel &&
               args.outputs % kUnit == 0 && args.inputs % kUnit == 0;
    }

    // Outputs [first, last) of `count` tokens.
    template <class T>
    static void run(const Group<T>& group, int64_t first, int64_t last, int64_t token, int64_t count, Pool& pool,
                    int thread) {
        const GroupedArgs& args = group.args;
        int64_t depth = args.inputs / Words::per_word, panels = (count + kPanel - 1) / kPanel, rows = last - first;
        auto words = static_cast<size_t>(kPanel * (depth * (1 + panels) + panels * rows));
        auto *copies = static_cast<uint32_t*>(pool.scratch(thread, words * 4)), *right = copies + kPanel * depth;
        auto* sums = reinterpret_cast<float*>(right + panels * kPanel * depth);
        const auto* x = reinterpret_cast<const char*>(group.x(token));
        for (int64_t i = 0; i < panels; ++i)
            pack_heads<Words>(x, args.type, args.x_stride, i * kPanel, count, args.inputs, depth, copies,
                              right + i * kPanel * depth);
        [[maybe_unused]] TilesInUse<Words> tiles;
        const T* left = group.weight() + first * args.output_stride;
        product<Words>({reinterpret_cast<const uint32_t*>(left), rows, depth, args.output_stride / Words::per_word, 1},
                       {right, panels, kPanel * depth}, {sums, rows * kPanel, nullptr});
        for (int64_t v = 0; v < count; v += kPanel)
            for (int64_t r = 0; r < rows; r += 16) {
                alignas(64) float turned[16 * kPanel];
                const auto* square = reinterpret_cast<const uint32_t*>(sums + v * rows + r * kPanel);
                transpose(square, kPanel, reinterpret_cast<uint32_t*>(turned), kPanel);
                for (int64_t i = 0; i < std::min(kPanel, count - v); ++i)
                    store16(group.out(token + v + i) + first + r, load(turned + i * kPanel));
            }
    }
};

template <class Words, class T>
void by_panels(const GroupedArgs& args, Pool& pool) {
    constexpr int64_t kTokens = AsPanels<Words>::kTokens;
    int64_t wide = args.tokens < kTokens ? kRows : kColumns, blocks = (args.outputs + wide - 1) / wide;
    int64_t rounds = (args.tokens + kTokens - 1) / kTokens;
    pool.run(args.groups * blocks * rounds, 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t item = begin; item < end; ++item) {
            Group<T> group{args, item / rounds / blocks};
            int64_t first = item / rounds % blocks * wide, last = std::min(first + wide, args.outputs);
            int64_t token = item % rounds * kTokens, count = std::min(kTokens, args.tokens - token);
            AsPanels<Words>::run(group, first, last, token, count, pool, thread);
        }
    });
}

template <class T>
void by_dots(const GroupedArgs& args, Pool& pool) {
    bool are_rows = args.input_stride == 1;
    int64_t wide = are_rows ? kRows : kColumns, blocks = (args.outputs + wide - 1) / wide;
    int64_t rounds = (args.tokens + kTokens - 1) / kTokens;
    int64_t work = std::min(args.tokens, kTokens) * wide * args.inputs / 4;
    size_t bytes = are_rows ? 0 : static_cast<size_t>(std::min(args.tokens, kTokens) * kColumns) * sizeof(float);
    pool.run(args.groups * blocks * rounds, rows_of_part(work), [&](int64_t begin, int64_t end, int thread) {
        for (int64_t item = begin; item < end; ++item) {
            Group<T> group{args, item / rounds / blocks};
            int64_t first = item / rounds % blocks * wide, last = std::min(first + wide, args.outputs);
            int64_t token = item % rounds * kTokens, count = std::min(kTokens, args.tokens - token);
            if (are_rows) by_rows(group, first, last, token, count);
            else by_columns(group, first, last, token, count, static_cast<float*>(pool.scratch(thread, bytes)));
        }
    });
}

void grouped_linear(const GroupedArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        with_words(args.type, args.type, [&](auto words) {
            using Words = decltype(words);
            if constexpr (Words::per_word * sizeof(T) == 4)
                if (AsPanels<Words>::takes(args)) return by_panels<Words, T>(args, pool);
            by_dots<T>(args, pool);
        });
    });
}

}  // namespace

SGL_KERNELS(sparse_grouped,
    SGL_KERNEL("grouped_linear", grouped_linear, GroupedArgs))

}  // namespace sgl::SGL_ISA
