// The root mean square norm of one row.
#pragma once

#include "elements.h"

namespace sgl::SGL_ISA {

template <class T>
float sum_of_squares(const T* x, int64_t width) {
    f32x16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 64 <= width; i += 64)
        for (int part = 0; part < 4; ++part) {
            f32x16 v = load16(x + i + 16 * part);
            sums[part] = fma(v, v, sums[part]);
        }
    for (; i < width; i += 16) {
        f32x16 v = get(x + i, width - i);
        sums[0] = fma(v, v, sums[0]);
    }
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

SGL_INLINE float norm_factor(float squares, int64_t width, double eps) {
    return 1.0f / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(eps));
}

// Cast to the weight's type before the product, as the reference does.
template <class W>
SGL_INLINE f32x16 normed(f32x16 x, f32x16 factor, f32x16 weight) {
    return mul(cast<W>(mul(x, factor)), weight);
}

// out may be x.
template <class T, class W>
void norm_row(const T* x, const W* weight, T* out, int64_t width, float factor) {
    f32x16 scale = set1(factor);
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) store16(out + i, normed<W>(load16(x + i), scale, load16(weight + i)));
    if (i < width) {
        int64_t left = width - i;
        put(out + i, normed<W>(get(x + i, left), scale, get(weight + i, left)), left);
    }
}

}  // namespace sgl::SGL_ISA
