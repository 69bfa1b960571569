#include "recurrent.h"

// out [rows, inner * size] = the norm of each `size` elements, times silu(gate) before it or after it; row g of the weight
// [groups, size] for the groups g, g + groups, ... of a row.
#define SGL_GATED_RMS_NORM_ARGS(P, I, D)                                                                        \
    P(x) I(x_stride) P(gate) I(gate_stride) P(weight) P(out) I(rows) I(inner) I(groups) I(size) I(gate_first) I(type) \
    D(eps)
SGL_ARGS(GatedRmsNormArgs, SGL_GATED_RMS_NORM_ARGS)

namespace sgl::SGL_ISA {

namespace {

// Floor: x, gate and out once.
template <class T>
void norm_group(const GatedRmsNormArgs& args, const T* x, const T* gate, const T* weight, T* out) {
    auto opened = [&](int64_t i) { return silu(get(gate + i, args.size - i)); };
    auto given = [&](int64_t i) {
        f32x16 wide = get(x + i, args.size - i);
        return args.gate_first ? mul(wide, opened(i)) : wide;
    };
    f32x16 sum = zero();
    for (int64_t i = 0; i < args.size; i += 16) sum = fma(given(i), given(i), sum);
    float mean = reduce_add(sum) / static_cast<float>(args.size);
    f32x16 factor = set1(1.0f / std::sqrt(mean + static_cast<float>(args.eps)));
    for (int64_t i = 0; i < args.size; i += 16) {
        int64_t left = args.size - i;
        f32x16 normed = mul(cast<T>(mul(given(i), factor)), get(weight + i, left));
        put(out + i, args.gate_first ? normed : mul(cast<T>(normed), opened(i)), left);
    }
}

void gated_rms_norm(const GatedRmsNormArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        each_row(pool, args.rows * args.inner, 8 * args.size, [&](int64_t group, int) {
            int64_t row = group / args.inner, place = group % args.inner * args.size;
            const T* weight = static_cast<const T*>(args.weight) + group % args.inner % args.groups * args.size;
            norm_group<T>(args, row_of<T>(args.x, row, args.x_stride) + place,
                          row_of<T>(args.gate, row, args.gate_stride) + place, weight,
                          static_cast<T*>(args.out) + group * args.size);
        });
    });
}

}  // namespace

SGL_KERNELS(recurrent_gated_norm,
    SGL_KERNEL("gated_rms_norm", gated_rms_norm, GatedRmsNormArgs))

}  // namespace sgl::SGL_ISA
