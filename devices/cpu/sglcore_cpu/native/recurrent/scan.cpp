#include "recurrent.h"

// dt = softplus(dt + dt_bias) in [dt_min, dt_max]; S = exp(-exp(a_log) dt) S + dt x B^T; out = S C + d x. xbc has heads
// of x, then groups of B, then groups of C; states [.., heads, size, width], a_log, d and dt_bias [heads] f32.
#define SGL_SELECTIVE_SCAN_ARGS(P, I, D)                                                                     \
    P(xbc) I(xbc_stride) P(dt) I(dt_stride) P(a_log) P(d) P(dt_bias) D(dt_min) D(dt_max) P(states) P(out)    \
    I(groups) I(heads) I(size) I(width) SGL_ROWS_ARGS(P, I)
SGL_ARGS(SelectiveScanArgs, SGL_SELECTIVE_SCAN_ARGS)

namespace sgl::SGL_ISA {

namespace {

constexpr int64_t kElements = 16;  // their part of a state stays in the nearest cache while a row's tokens pass

// One token over some rows of a state [size, width], each of which it reads and writes once.
template <class T>
void step(const SelectiveScanArgs& args, const float* before, const float* after, const T* x, float* state, T* out,
          int64_t count, float time, float decay, float skip) {
    for (int64_t i = 0; i < count; ++i) {
        float value = widened(x[i]);
        f32x16 taken = set1(time * value), kept = set1(decay), sum = zero();
        float* row = state + i * args.width;
        for (int64_t column = 0; column < args.width; column += 16) {
            int64_t left = args.width - column;
            f32x16 held = fma(taken, get(before + column, left), mul(kept, get(row + column, left)));
            put(row + column, held, left);
            sum = fma(held, get(after + column, left), sum);
        }
        float result = reduce_add(sum) + skip * value;
        if constexpr (sizeof(T) == 2) out[i] = to_bf16(result);
        else out[i] = result;
    }
}

template <class T>
void widen(const T* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) put(to + i, get(from + i, count - i), count - i);
}

// Floor of a step: each state read and written once, 8 * heads * size * width bytes a row.
void selective_scan(const SelectiveScanArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        int64_t of_head = (args.size + kElements - 1) / kElements, all = args.heads * args.size;
        int64_t work = 3 * kElements * args.width;
        each_part<T>(pool, args, args.heads * of_head, work, all, [&](const Row& row, int64_t part, int thread) {
            auto* own = static_cast<float*>(pool.scratch(thread, (2 + kElements) * args.width * sizeof(float)));
            int64_t head = part / of_head, first = part % of_head * kElements;
            int64_t group = head / (args.heads / args.groups) * args.width;
            float rate = -std::exp(static_cast<const float*>(args.a_log)[head]);
            float skip = static_cast<const float*>(args.d)[head], bias = static_cast<const float*>(args.dt_bias)[head];
            int64_t count = std::min(kElements, args.size - first);
            auto state_of = [&](int64_t slot) {
                return static_cast<float*>(args.states) + ((slot * args.heads + head) * args.size + first) * args.width;
            };
            bool is_apart = row.target != row.slot;
            float* state = is_apart ? own + 2 * args.width : state_of(row.slot);
            if (is_apart) std::memcpy(state, state_of(row.slot), count * args.width * sizeof(float));
            for (int64_t token = row.first; token < row.last; ++token) {
                const T* given = row_of<T>(args.xbc, token, args.xbc_stride);
                widen(given + all + group, own, args.width);
                widen(given + all + args.groups * args.width + group, own + args.width, args.width);
                float time = softplus(widened(row_of<T>(args.dt, token, args.dt_stride)[head]) + bias);
                time = std::min(std::max(time, static_cast<float>(args.dt_min)), static_cast<float>(args.dt_max));
                int64_t place = head * args.size + first;
                step<T>(args, own, own + args.width, given + place, state, row_of<T>(args.out, token, all) + place,
                        count, time, std::exp(rate * time), skip);
            }
            if (is_apart && row.target) {
                std::memcpy(state_of(row.target), state, count * args.width * sizeof(float));
            }
        });
    });
}

}  // namespace

SGL_KERNELS(recurrent_scan,
    SGL_KERNEL("selective_scan", selective_scan, SelectiveScanArgs))

}  // namespace sgl::SGL_ISA
