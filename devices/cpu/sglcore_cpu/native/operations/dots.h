// Dot products of four rows of a plain weight with up to four vectors.
#pragma once

#include "elements.h"

namespace sgl::SGL_ISA {

// One step over a row: sixteen floats, or 64 bytes of bf16.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int64_t kSize = 16;
    using Lanes = f32x16;
    static Lanes read(const float* p) { return load(p); }
    static f32x16 dot(f32x16 sum, Lanes a, Lanes b) { return fma(a, b, sum); }
};

template <>
struct Step<bf16> {
    static constexpr int64_t kSize = 32;
    using Lanes = line;
    static Lanes read(const bf16* p) { return load_line(p); }
    static f32x16 dot(f32x16 sum, Lanes a, Lanes b) { return dot_bf16(sum, a, b); }
};

// out[v][r] = rows[r] . vectors[v] over `size` elements.
template <class T, int V>
void dot_rows(const T* const (&rows)[4], const T* const* vectors, int64_t size, float (&out)[V][4]) {
    using S = Step<T>;
    f32x16 sums[V][4];
    for (int v = 0; v < V; ++v)
        for (int r = 0; r < 4; ++r) sums[v][r] = zero();
    int64_t i = 0;
    for (; i + S::kSize <= size; i += S::kSize) {
        typename S::Lanes weights[4] = {
            S::read(rows[0] + i), S::read(rows[1] + i), S::read(rows[2] + i), S::read(rows[3] + i)};
        for (int v = 0; v < V; ++v) {
            typename S::Lanes x = S::read(vectors[v] + i);
            for (int r = 0; r < 4; ++r) sums[v][r] = S::dot(sums[v][r], weights[r], x);
        }
    }
    for (; i < size; i += 16)
        for (int v = 0; v < V; ++v)
            for (int r = 0; r < 4; ++r)
                sums[v][r] = fma(get(rows[r] + i, size - i), get(vectors[v] + i, size - i), sums[v][r]);
    for (int v = 0; v < V; ++v)
        for (int r = 0; r < 4; ++r) out[v][r] = reduce_add(sums[v][r]);
}

// take(v, four products) for each of `count` vectors.
template <class T, class Take>
void dot_all(const T* const (&rows)[4], const T* const* vectors, int64_t count, int64_t size, Take&& take) {
    int64_t v = 0;
    for (; v + 4 <= count; v += 4) {
        float out[4][4];
        dot_rows<T, 4>(rows, vectors + v, size, out);
        for (int i = 0; i < 4; ++i) take(v + i, out[i]);
    }
    for (; v < count; ++v) {
        float out[1][4];
        dot_rows<T, 1>(rows, vectors + v, size, out);
        take(v, out[0]);
    }
}

}  // namespace sgl::SGL_ISA
