// Where the tokens of a row lie, and how a head's elements are read, 32 at a time.
#pragma once

#include <algorithm>

#include "attention.h"
#include "isa.h"

namespace sgl::SGL_ISA {

inline int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The cells of keys or of values.
struct Cells {
    const char* base;
    int64_t head_bytes, cell_bytes;

    template <class Args>
    Cells(const void* cells, const Args& args) : base(static_cast<const char*>(cells)) {
        int64_t element = args.kv_type == kF32 ? 4 : args.kv_type == kBF16 ? 2 : 1;
        head_bytes = args.dim * element + (args.kv_type == kI8 ? 4 : 0);
        cell_bytes = head_bytes * args.kv_heads;
    }
};

// Cell numbers of the positions [first, first + count) of a row with these pages.
inline void locate(const int32_t* pages, int64_t page_size, int64_t first, int64_t count, int64_t* cells) {
    int64_t page = first / page_size, offset = first % page_size;
    for (int64_t done = 0; done < count; ++page, offset = 0) {
        int64_t run = std::min(page_size - offset, count - done), start = pages[page] * page_size + offset;
        for (int64_t i = 0; i < run; ++i) cells[done + i] = start + i;
        done += run;
    }
}

struct Pair {
    f32x16 a, b;
};

// 32 elements as two vectors: of bf16 the even and the odd ones, of the others the first and the second sixteen.
template <int64_t Kind>
struct Element;

template <>
struct Element<kF32> {
    static constexpr int64_t bytes = 4, interleaved = 0;
    SGL_INLINE Pair load32(const char* p) {
        const auto* from = reinterpret_cast<const float*>(p);
        return {load(from), load(from + 16)};
    }
    SGL_INLINE Pair load32_first(const char* p, int64_t n) {
        const auto* from = reinterpret_cast<const float*>(p);
        return {load_first(from, std::min<int64_t>(n, 16)), n > 16 ? load_first(from + 16, n - 16) : zero()};
    }
    SGL_INLINE float scale(const char*, int64_t) { return 1.0f; }
};

template <>
struct Element<kBF16> {
    static constexpr int64_t bytes = 2, interleaved = 1;
    SGL_INLINE Pair load32(const char* p) {
        line both = load_line(p);
        return {pair_first(both), pair_second(both)};
    }
    SGL_INLINE Pair load32_first(const char* p, int64_t n) {
        line both = load_line_first(p, 2 * n);
        return {pair_first(both), pair_second(both)};
    }
    SGL_INLINE float scale(const char*, int64_t) { return 1.0f; }
};

template <>
struct Element<kI8> {
    static constexpr int64_t bytes = 1, interleaved = 0;
    SGL_INLINE Pair load32(const char* p) {
        const auto* from = reinterpret_cast<const int8_t*>(p);
        return {load_i8(from), load_i8(from + 16)};
    }
    SGL_INLINE Pair load32_first(const char* p, int64_t n) {
        const auto* from = reinterpret_cast<const int8_t*>(p);
        return {load_i8_first(from, std::min<int64_t>(n, 16)), n > 16 ? load_i8_first(from + 16, n - 16) : zero()};
    }
    SGL_INLINE float scale(const char* head, int64_t dim) {
        float value;
        std::memcpy(&value, head + dim, 4);
        return value;
    }
};

// `dim` elements of x from `at` on, in the order of Element<Kind>, filled up with zeros to a multiple of 32.
template <int64_t Kind>
inline void arrange(const void* x, int64_t type, int64_t at, int64_t dim, float* to) {
    for (int64_t first = 0; first < dim; first += 32, to += 32) {
        int64_t n = std::min<int64_t>(32, dim - first);
        if (type == Kind && type != kI8) {
            const char* from = static_cast<const char*>(x) + (at + first) * Element<Kind>::bytes;
            Pair both = n == 32 ? Element<Kind>::load32(from) : Element<Kind>::load32_first(from, n);
            store(to, both.a), store(to + 16, both.b);
            continue;
        }
        std::fill(to, to + 32, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            float value = type == kF32 ? static_cast<const float*>(x)[at + first + i]
                                       : from_bf16(static_cast<const bf16*>(x)[at + first + i]);
            to[Element<Kind>::interleaved ? i / 2 + i % 2 * 16 : i] = value;
        }
    }
}

// The way back: `dim` elements of out from `at` on are those of x * factor.
template <int64_t Kind>
inline void restore(const float* x, float factor, void* out, int64_t type, int64_t at, int64_t dim) {
    for (int64_t first = 0; first < dim; first += 32, x += 32) {
        int64_t n = std::min<int64_t>(32, dim - first);
        alignas(64) float a[16], b[16], plain[32];
        store(a, mul(load(x), set1(factor))), store(b, mul(load(x + 16), set1(factor)));
        if (Element<Kind>::interleaved) {
            for (int i = 0; i < 16; ++i) plain[2 * i] = a[i], plain[2 * i + 1] = b[i];
        } else {
            std::memcpy(plain, a, 64), std::memcpy(plain + 16, b, 64);
        }
        f32x16 low = load(plain), high = load(plain + 16);
        int64_t n_low = std::min<int64_t>(n, 16), n_high = n - n_low;
        if (type == kF32) {
            float* to = static_cast<float*>(out) + at + first;
            store_first(to, low, n_low);
            if (n_high) store_first(to + 16, high, n_high);
        } else {
            bf16* to = static_cast<bf16*>(out) + at + first;
            store_bf16_first(to, low, n_low);
            if (n_high) store_bf16_first(to + 16, high, n_high);
        }
    }
}

inline void fill_zero(void* out, int64_t type, int64_t first, int64_t last, int64_t width) {
    int64_t row = width * (type == kF32 ? 4 : 2);
    if (last > first) std::memset(static_cast<char*>(out) + first * row, 0, static_cast<size_t>((last - first) * row));
}

}  // namespace sgl::SGL_ISA
