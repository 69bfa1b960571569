// Dot products of a block of rows of a plain weight with vectors.
#pragma once

#include <algorithm>

#include "elements.h"

namespace sgl::SGL_ISA {

// As the registers allow: the sums of a group of rows with so many vectors, a step of a row, and one of each vector.
constexpr int kGroup = SGL_LEVEL >= 3 ? 8 : 4;
constexpr int kTogether = SGL_LEVEL >= 3 ? 3 : 1;
constexpr int64_t kBlock = 16;  // rows at most, whose products with a vector are side by side

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

// Up to kBlock rows of a weight.
template <class T>
struct Rows {
    const T* first;
    int64_t size, apart, count;  // elements of a row, and from one to the next

    const T* at(int64_t row) const { return first + std::min(row, count - 1) * apart; }
};

// Each product is one chain of sums in the order of the elements: its bits are the same in whatever group it is computed.
template <class T>
SGL_INLINE f32x16 add_rest(f32x16 sum, const T* row, const T* vector, int64_t i, int64_t size) {
    for (; i < size; i += 16) sum = fma(get(row + i, size - i), get(vector + i, size - i), sum);
    return sum;
}

// Bytes that are fetched before they are read: the processor's own guess stops at the end of every page.
constexpr int64_t kAhead = 12 << 10;

// out[r] = rows[r] . vector, row by row: one stream of memory, read at twice the speed of several.
template <class T>
void dot_stream(const Rows<T>& rows, const T* vector, float* out) {
    using S = Step<T>;
    constexpr int64_t ahead = kAhead / sizeof(T);
    const int64_t whole = rows.size / S::kSize * S::kSize;
    for (int64_t row = 0; row < rows.count; row += kGroup) {
        const T* weights[kGroup];
        for (int64_t r = 0; r < kGroup; ++r) weights[r] = rows.at(row + r);
        f32x16 sums[kGroup];
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) {
            sums[r] = zero();
            for (int64_t i = 0; i < whole; i += S::kSize) {
                __builtin_prefetch(weights[r] + i + ahead, 0, 3);
                sums[r] = S::dot(sums[r], S::read(weights[r] + i), S::read(vector + i));
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) sums[r] = add_rest(sums[r], weights[r], vector, whole, rows.size);
#pragma GCC unroll 2
        for (int r = 0; r < kGroup; r += 4) reduce_add4(out + row + r, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
    }
}

// out[v * stride + r] = rows[r] . vectors[v] for the group of rows from `row` on, which are in the cache.
template <class T, int V>
void dot_group(const Rows<T>& rows, int64_t row, const T* const* vectors, float* out, int64_t stride) {
    using S = Step<T>;
    const T* weights[kGroup];
    for (int64_t r = 0; r < kGroup; ++r) weights[r] = rows.at(row + r);
    f32x16 sums[V][kGroup];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) sums[v][r] = zero();
    int64_t i = 0;
    for (; i + S::kSize <= rows.size; i += S::kSize) {
        typename S::Lanes x[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) x[v] = S::read(vectors[v] + i);
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) {
            typename S::Lanes lanes = S::read(weights[r] + i);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[v][r] = S::dot(sums[v][r], lanes, x[v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
        for (int r = 0; r < kGroup; ++r) sums[v][r] = add_rest(sums[v][r], weights[r], vectors[v], i, rows.size);
#pragma GCC unroll 2
        for (int r = 0; r < kGroup; r += 4)
            reduce_add4(out + v * stride + row + r, sums[v][r], sums[v][r + 1], sums[v][r + 2], sums[v][r + 3]);
    }
}

// out[v * stride + r] = rows[r] . vectors[v] for `count` >= 1 vectors; up to kBlock floats of each are written.
template <class T>
void dot_all(const Rows<T>& rows, const T* const* vectors, int64_t count, float* out, int64_t stride) {
    dot_stream(rows, vectors[0], out);
    int64_t v = 1;
    for (; v + kTogether <= count; v += kTogether)
        for (int64_t row = 0; row < rows.count; row += kGroup)
            dot_group<T, kTogether>(rows, row, vectors + v, out + v * stride, stride);
    for (; v < count; ++v)
        for (int64_t row = 0; row < rows.count; row += kGroup)
            dot_group<T, 1>(rows, row, vectors + v, out + v * stride, stride);
}

}  // namespace sgl::SGL_ISA
