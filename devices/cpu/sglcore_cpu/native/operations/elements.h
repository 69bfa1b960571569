// Rows of float32 or bf16 as sixteen lanes of float32, and when several threads are worth their waking.
//
// In the arguments of kernels `type` is the element type, f32 or bf16; strides are elements from row to row; indices are i32
// or i64 (`.._bytes`). Where the reference casts to the element type between two operations, so do the kernels.
#pragma once

#include "isa.h"
#include "kernels.h"

namespace sgl::SGL_ISA {

SGL_INLINE f32x16 load16(const float* p) { return load(p); }
SGL_INLINE f32x16 load16(const bf16* p) { return load_bf16(p); }
SGL_INLINE void store16(float* p, f32x16 x) { store(p, x); }
SGL_INLINE void store16(bf16* p, f32x16 x) { store_bf16(p, x); }

// The first n lanes, all sixteen for n >= 16; nothing beyond is touched.
SGL_INLINE f32x16 get(const float* p, int64_t n) { return n >= 16 ? load(p) : load_first(p, n); }
SGL_INLINE f32x16 get(const bf16* p, int64_t n) { return n >= 16 ? load_bf16(p) : load_bf16_first(p, n); }
SGL_INLINE void put(float* p, f32x16 x, int64_t n) { n >= 16 ? store(p, x) : store_first(p, x, n); }
SGL_INLINE void put(bf16* p, f32x16 x, int64_t n) { n >= 16 ? store_bf16(p, x) : store_bf16_first(p, x, n); }

SGL_INLINE float as_float(float x) { return x; }
SGL_INLINE float as_float(bf16 x) { return from_bf16(x); }
SGL_INLINE void assign(float* out, float x) { *out = x; }
SGL_INLINE void assign(bf16* out, float x) { *out = to_bf16(x); }

// What is NaN stays so.
SGL_INLINE f32x16 at_most(f32x16 x, f32x16 limit) { return where_less(limit, x, limit, x); }
SGL_INLINE f32x16 at_least(f32x16 x, f32x16 limit) { return where_less(x, limit, limit, x); }

// What is left of the value in memory of type T.
template <class T>
SGL_INLINE f32x16 cast(f32x16 x) {
    if constexpr (sizeof(T) == 2) return rounded(x);
    return x;
}

// Rows of one part: fewer elements than this take less time than a second thread's waking.
constexpr int64_t kWorthWaking = 16384;
SGL_INLINE int64_t rows_of_part(int64_t width) { return width >= kWorthWaking ? 1 : kWorthWaking / (width + 1) + 1; }

// body(row, thread) for every row, by several threads where that is worth it.
template <class Body>
void each_row(Pool& pool, int64_t rows, int64_t width, Body&& body) {
    pool.run(rows, rows_of_part(width), [&](int64_t first, int64_t last, int thread) {
        for (int64_t row = first; row < last; ++row) body(row, thread);
    });
}

// An index of 4 or 8 bytes.
SGL_INLINE int64_t index_at(const void* indices, int64_t bytes, int64_t i) {
    return bytes == 4 ? static_cast<const int32_t*>(indices)[i] : static_cast<const int64_t*>(indices)[i];
}

// call(T{}) with the element type that an argument names.
template <class Call>
void with_type(int64_t type, Call&& call) {
    if (type == kBF16) return call(bf16{});
    call(float{});
}

template <class T>
const T* row_of(const void* data, int64_t row, int64_t stride) {
    return static_cast<const T*>(data) + row * stride;
}
template <class T>
T* row_of(void* data, int64_t row, int64_t stride) {
    return static_cast<T*>(data) + row * stride;
}

}  // namespace sgl::SGL_ISA
