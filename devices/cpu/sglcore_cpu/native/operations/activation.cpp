#include "elements.h"

// out [rows, width]; x [rows, 2 * width] for those that multiply, [rows, width] for gelu.
#define SGL_ACTIVATION_ARGS(P, I, D) P(x) I(x_stride) P(out) I(rows) I(width) I(type)
SGL_ARGS(ActivationArgs, SGL_ACTIVATION_ARGS)

// A gate of at most `limit`, and what it opens within it.
#define SGL_LIMITED_ACTIVATION_ARGS(P, I, D) SGL_ACTIVATION_ARGS(P, I, D) D(limit)
SGL_ARGS(LimitedActivationArgs, SGL_LIMITED_ACTIVATION_ARGS)

namespace sgl::SGL_ISA {

namespace {

// erfc(a) for a >= 0 as t * P(t) * e^(-a^2), t = 1 / (1 + a / 2): P of degree 8 is within 3e-7 of erfc(a) e^(a^2) / t on
// [0, 10], found by least squares with Lawson's weights (Lawson 1961).
SGL_INLINE f32x16 erfc_of_positive(f32x16 a) {
    constexpr float terms[] = {-0.0590676442f, 0.284569114f, -0.487188995f, 0.278055966f, -0.0266188346f,
                               0.202684328f,   0.243104324f, 0.282375246f,  0.282086432f};
    f32x16 t = div(set1(1.0f), fma(a, set1(0.5f), set1(1.0f)));
    f32x16 p = set1(terms[0]);
    for (int i = 1; i < 9; ++i) p = fma(p, t, set1(terms[i]));
    return mul(mul(p, t), exp(sub(zero(), mul(a, a))));
}

// The bound keeps an infinite x from 0 * infinity; NaN passes it. x * Phi(x) with Phi(x) = 1 - erfc(|x| / sqrt 2) / 2 for x >= 0 and erfc(|x| / sqrt 2) / 2 below.
SGL_INLINE f32x16 gelu_of(f32x16 x) {
    f32x16 size = min(set1(20.0f), max(x, sub(zero(), x)));
    f32x16 tail = mul(mul(erfc_of_positive(mul(size, set1(0.70710678118654752f))), set1(0.5f)), size);
    return sub(max(x, zero()), tail);
}

// x / 2 * (1 + tanh(z)) = x / (1 + e^(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3).
SGL_INLINE f32x16 gelu_tanh_of(f32x16 x) {
    f32x16 cubic = fma(mul(x, set1(0.044715f)), mul(x, x), x);
    return div(x, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216f)))));
}

// The activation of the gate, cast, times what lies beside it, both within a limit (gates above it only).
template <class Args, class Activation>
void activate_and_mul(const Args& args, Pool& pool, double limit, Activation&& activation) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        f32x16 most = cast<T>(set1(static_cast<float>(limit)));
        each_row(pool, args.rows, 4 * args.width, [&](int64_t row, int) {
            const T* gate = row_of<T>(args.x, row, args.x_stride);
            T* out = row_of<T>(args.out, row, args.width);
            for (int64_t i = 0; i < args.width; i += 16) {
                int64_t left = args.width - i;
                f32x16 up = at_least(at_most(get(gate + args.width + i, left), most), sub(zero(), most));
                put(out + i, mul(cast<T>(activation(at_most(get(gate + i, left), most))), up), left);
            }
        });
    });
}

void silu_and_mul(const ActivationArgs& args, Pool& pool) {
    activate_and_mul(args, pool, INFINITY, [](f32x16 x) { return silu(x); });
}

void limited_silu_and_mul(const LimitedActivationArgs& args, Pool& pool) {
    activate_and_mul(args, pool, args.limit, [](f32x16 x) { return silu(x); });
}

void gelu_tanh_and_mul(const ActivationArgs& args, Pool& pool) {
    activate_and_mul(args, pool, INFINITY, [](f32x16 x) { return gelu_tanh_of(x); });
}

void gelu(const ActivationArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        each_row(pool, args.rows, 4 * args.width, [&](int64_t row, int) {
            const T* x = row_of<T>(args.x, row, args.x_stride);
            T* out = row_of<T>(args.out, row, args.width);
            for (int64_t i = 0; i < args.width; i += 16)
                put(out + i, gelu_of(get(x + i, args.width - i)), args.width - i);
        });
    });
}

}  // namespace

SGL_KERNELS(operations_activation,
    SGL_KERNEL("silu_and_mul", silu_and_mul, ActivationArgs),
    SGL_KERNEL("limited_silu_and_mul", limited_silu_and_mul, LimitedActivationArgs),
    SGL_KERNEL("gelu_tanh_and_mul", gelu_tanh_and_mul, ActivationArgs),
    SGL_KERNEL("gelu", gelu, ActivationArgs))

}  // namespace sgl::SGL_ISA
