#include "normed.h"
#include "elements.h"

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, the product of `weight_type`. A row is [inner] rows of an outer one: row
// r begins at (r / inner) * outer_stride + (r % inner) * inner_stride.
#define SGL_RMS_NORM_ARGS(P, I, D) \
    P(x) I(outer_stride) I(inner) I(inner_stride) P(weight) P(out) I(rows) I(width) I(type) I(weight_type) D(eps)
SGL_ARGS(RmsNormArgs, SGL_RMS_NORM_ARGS)

// residual += x, x = the norm of that.
#define SGL_ADD_RMS_NORM_ARGS(P, I, D) \
    P(x) I(x_stride) P(residual) I(residual_stride) P(weight) I(rows) I(width) I(type) I(weight_type) D(eps)
SGL_ARGS(AddRmsNormArgs, SGL_ADD_RMS_NORM_ARGS)

#define SGL_LAYER_NORM_ARGS(P, I, D) P(x) I(x_stride) P(weight) P(bias) P(out) I(rows) I(width) I(type) D(eps)
SGL_ARGS(LayerNormArgs, SGL_LAYER_NORM_ARGS)

namespace sgl::SGL_ISA {

namespace {

// residual += x, in T; the sum of the squares of what is stored.
template <class T>
float add_row(const T* x, T* residual, int64_t width) {
    f32x16 sums[2] = {zero(), zero()};
    for (int64_t i = 0, part = 0; i < width; i += 16, part ^= 1) {
        int64_t left = width - i;
        f32x16 total = cast<T>(add(get(residual + i, left), get(x + i, left)));
        put(residual + i, total, left);
        sums[part] = fma(total, total, sums[part]);
    }
    return reduce_add(add(sums[0], sums[1]));
}

template <class T>
float sum_of(const T* x, int64_t width) {
    f32x16 sum = zero();
    for (int64_t i = 0; i < width; i += 16) sum = add(sum, get(x + i, width - i));
    return reduce_add(sum);
}

template <class T>
float sum_of_deviations(const T* x, int64_t width, float mean) {
    f32x16 sum = zero();
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        f32x16 off = sub(load16(x + i), set1(mean));
        sum = fma(off, off, sum);
    }
    float total = reduce_add(sum);
    if (i == width) return total;
    // The lanes beyond the row are 0, so each adds the square of the mean; they are not counted.
    alignas(64) float lanes[16];
    store(lanes, get(x + i, width - i));
    for (int64_t lane = 0; lane < width - i; ++lane) total += (lanes[lane] - mean) * (lanes[lane] - mean);
    return total;
}

template <class T>
void layer_norm_row(const LayerNormArgs& args, int64_t row) {
    const T* x = row_of<T>(args.x, row, args.x_stride);
    T* out = row_of<T>(args.out, row, args.width);
    auto width = static_cast<float>(args.width);
    float mean = sum_of(x, args.width) / width;
    float variance = sum_of_deviations(x, args.width, mean) / width;
    f32x16 center = set1(mean), factor = set1(1.0f / std::sqrt(variance + static_cast<float>(args.eps)));
    for (int64_t i = 0; i < args.width; i += 16) {
        int64_t left = args.width - i;
        f32x16 scaled = mul(sub(get(x + i, left), center), factor);
        f32x16 weight = get(row_of<T>(args.weight, 0, 0) + i, left), bias = get(row_of<T>(args.bias, 0, 0) + i, left);
        put(out + i, fma(scaled, weight, bias), left);
    }
}

// Calls with an element of the rows' type, and the weight.
template <class Args, class Call>
void with_types(const Args& args, Call&& call) {
    with_type(args.type, [&](auto element) {
        with_type(args.weight_type, [&](auto weight) { call(element, row_of<decltype(weight)>(args.weight, 0, 0)); });
    });
}

void rms_norm(const RmsNormArgs& args, Pool& pool) {
    with_types(args, [&](auto element, auto weight) {
        using T = decltype(element);
        each_row(pool, args.rows, args.width, [&](int64_t row, int) {
            const T* x = row_of<T>(args.x, row / args.inner, args.outer_stride) + row % args.inner * args.inner_stride;
            float factor = norm_factor(sum_of_squares(x, args.width), args.width, args.eps);
            norm_row(x, weight, row_of<T>(args.out, row, args.width), args.width, factor);
        });
    });
}

void add_rms_norm(const AddRmsNormArgs& args, Pool& pool) {
    with_types(args, [&](auto element, auto weight) {
        using T = decltype(element);
        each_row(pool, args.rows, args.width, [&](int64_t row, int) {
            T* x = row_of<T>(args.x, row, args.x_stride);
            T* residual = row_of<T>(args.residual, row, args.residual_stride);
            float factor = norm_factor(add_row<T>(x, residual, args.width), args.width, args.eps);
            norm_row<T>(residual, weight, x, args.width, factor);
        });
    });
}

void layer_norm(const LayerNormArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        each_row(pool, args.rows, args.width, [&](int64_t row, int) { layer_norm_row<T>(args, row); });
    });
}

}  // namespace

SGL_KERNELS(operations_norm,
    SGL_KERNEL("rms_norm", rms_norm, RmsNormArgs),
    SGL_KERNEL("add_rms_norm", add_rms_norm, AddRmsNormArgs),
    SGL_KERNEL("layer_norm", layer_norm, LayerNormArgs))

}  // namespace sgl::SGL_ISA
