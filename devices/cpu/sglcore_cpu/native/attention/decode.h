// One token of a row against a chunk of its keys: the inner loops of decoding, over a few heads of one KV head at once.
#pragma once

#include "cells.h"
#include "sums.h"

namespace sgl::SGL_ISA {

constexpr int64_t kChunk = 256;  // keys of one work item: sums depend on it and on nothing else of the batch
constexpr int64_t kBlock = 16;   // keys whose scores are summed up together
// Heads and lines of 32 elements whose sums stay in registers.
constexpr int kHeads = SGL_LEVEL >= 3 ? 4 : 2;
constexpr int least_lines(int a, int b) { return a < b ? a : b; }
constexpr int lines_at_once(int heads) { return SGL_LEVEL >= 3 ? (heads <= 2 ? 4 : 2) : (heads == 1 ? 2 : 1); }

// The part of a row that is worked on: cells of its keys, and the shape of a head.
struct Chunk {
    const int64_t* cells;
    int64_t count, dim, width;  // width: dim as a multiple of 32
};

// Lines of cache of a head with so many lines of 32 elements.
template <int64_t Kind>
constexpr int head_lines(int lines) {
    return lines == 0 ? 0 : (lines * 32 * static_cast<int>(Element<Kind>::bytes) + (Kind == kI8 ? 4 : 0) + 63) / 64;
}

// Fetches a stream of cells ahead of who reads them, one KV head at a time and in the order in which they lie: keys of
// a chunk, then its values. A burst of fetches would make the processor wait, so they come between the products.
class Fetcher {
    static constexpr int64_t kLineOfCache = 64;

  public:
    // `heads` heads from `head` on of the `count` cells.
    Fetcher(const Cells& keys, const Cells& values, const int64_t* cells, int64_t count, int64_t head, int64_t heads)
        : bases_{keys.base + head * keys.head_bytes, values.base + head * values.head_bytes}, cells_(cells),
          count_(count), heads_(heads), head_bytes_(keys.head_bytes), cell_bytes_(keys.cell_bytes) {
        next_ = bases_[0] + cells_[0] * cell_bytes_;
    }

    // `Lines` of cache of a head (0: as many as it has).
    template <int Lines>
    SGL_INLINE void fetch(Fetcher& at) {
        if (at.part_ == 2) return;
        if constexpr (Lines == 0) {
            for (int64_t i = 0; i < at.head_bytes_; i += kLineOfCache) __builtin_prefetch(at.next_ + i, 0, 2);
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < Lines; ++i) __builtin_prefetch(at.next_ + i * kLineOfCache, 0, 2);
        }
        at.next_ += at.head_bytes_;
        if (++at.head_ < at.heads_) return;
        at.head_ = 0;
        if (++at.cell_ == at.count_) at.cell_ = 0, ++at.part_;
        if (at.part_ < 2) at.next_ = at.bases_[at.part_] + at.cells_[at.cell_] * at.cell_bytes_;
    }

  private:
    const char* bases_[2];
    const char* next_;
    const int64_t* cells_;
    int64_t count_, heads_, head_bytes_, cell_bytes_, head_ = 0, cell_ = 0;
    int part_ = 0;
};

// A head's lines of 32 elements are known to the compiler for the usual head sizes (0: any size).
constexpr int kAnySize = 0;

// q[n] . key for a few heads: lines by turns into two sums, so that no product waits for the one before.
template <int64_t Kind, int N, int Lines>
struct Queries {
    f32x16 a[N][Lines], b[N][Lines];

    SGL_INLINE Queries load_all(const float* q, int64_t width) {
        Queries all;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
            for (int l = 0; l < Lines; ++l) {
                all.a[n][l] = load(q + n * width + l * 32);
                all.b[n][l] = load(q + n * width + l * 32 + 16);
            }
        return all;
    }
    SGL_INLINE void meet(const Queries& q, const char* key, f32x16* sum) {
        f32x16 other[N];
#pragma GCC unroll 4
        for (int l = 0; l < Lines; ++l) {
            Pair k = Element<Kind>::load32(key + l * 32 * Element<Kind>::bytes);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                sum[n] = l == 0 ? mul(k.a, q.a[n][0]) : fma(k.a, q.a[n][l], sum[n]);
                other[n] = l == 0 ? mul(k.b, q.b[n][0]) : fma(k.b, q.b[n][l], other[n]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[n] = add(sum[n], other[n]);
    }
};

// The same for any size; the last line may be a part.
template <int64_t Kind, int N>
struct Queries<Kind, N, kAnySize> {
    const float* q;
    int64_t width;

    SGL_INLINE Queries load_all(const float* q, int64_t width) { return {q, width}; }
    SGL_INLINE void add_line(const Queries& q, int64_t l, Pair k, f32x16* sum) {
        for (int n = 0; n < N; ++n) {
            const float* part = q.q + n * q.width + l * 32;
            sum[n] = fma(k.b, load(part + 16), fma(k.a, load(part), sum[n]));
        }
    }
    SGL_INLINE void meet(const Queries& q, const char* key, int64_t dim, f32x16* sum) {
        int64_t whole = dim / 32, rest = dim % 32, bytes = 32 * Element<Kind>::bytes;
        for (int n = 0; n < N; ++n) sum[n] = zero();
        for (int64_t l = 0; l < whole; ++l) add_line(q, l, Element<Kind>::load32(key + l * bytes), sum);
        if (rest) add_line(q, whole, Element<Kind>::load32_first(key + whole * bytes, rest), sum);
    }
};

// scores[n * kChunk + i] = q[n] . key[i] * scale[i] for a block of keys [first, last); q is [N][width]. The scores of
// absent keys of the block are zero.
template <int64_t Kind, int N, int Lines, bool Fetches>
void score(const Chunk& chunk, const char* head, int64_t cell_bytes, int64_t first, int64_t last,
           const float* q, float* scores, Fetcher& ahead) {
    using Q = Queries<Kind, N, Lines>;
    const Q queries = Q::load_all(q, chunk.width);
    f32x16 sums[N][kBlock];
    alignas(64) float scales[kBlock] = {};
    for (int64_t i = first; i < last; ++i) {
        if (Fetches) Fetcher::fetch<head_lines<Kind>(Lines)>(ahead);
        const char* key = head + chunk.cells[i] * cell_bytes;
        f32x16 sum[N];
        if constexpr (Lines == kAnySize)
            Q::meet(queries, key, chunk.dim, sum);
        else
            Q::meet(queries, key, sum);
        if (Kind == kI8) scales[i - first] = Element<Kind>::scale(key, chunk.dim);
        for (int n = 0; n < N; ++n) sums[n][kPlaceOfSum[i - first]] = sum[n];
    }
    for (int64_t i = last - first; i < kBlock; ++i)
        for (int n = 0; n < N; ++n) sums[n][kPlaceOfSum[i]] = zero();
    for (int n = 0; n < N; ++n) {
        f32x16 found = sixteen_sums(sums[n]);
        store(scores + n * kChunk + first, Kind == kI8 ? mul(found, load(scales)) : found);
    }
}

// sums[n] += weights[n * kChunk + i] * value[i] for keys [first, last), L lines of 32 elements from line `at` on; the
// last of them may have `rest` elements only (0: all 32).
template <int64_t Kind, int N, int L, int Lines, bool Fetches>
void gather_lines(const Chunk& chunk, const char* head, int64_t cell_bytes, int64_t first, int64_t last,
                  const float* weights, float* sums, int64_t at, int64_t rest, Fetcher& ahead) {
    int64_t width = chunk.width;
    f32x16 sum[N][2 * L];
    for (int n = 0; n < N; ++n)
        for (int l = 0; l < 2 * L; ++l) sum[n][l] = load(sums + n * width + at * 32 + l * 16);
    for (int64_t i = first; i < last; ++i) {
        if (Fetches && at == 0) Fetcher::fetch<head_lines<Kind>(Lines)>(ahead);
        const char* value = head + chunk.cells[i] * cell_bytes + at * 32 * Element<Kind>::bytes;
        f32x16 weight[N];
        for (int n = 0; n < N; ++n) weight[n] = set1(weights[n * kChunk + i]);
        for (int l = 0; l < L; ++l) {
            const char* from = value + l * 32 * Element<Kind>::bytes;
            Pair v = L == 1 && rest ? Element<Kind>::load32_first(from, rest) : Element<Kind>::load32(from);
            for (int n = 0; n < N; ++n) {
                sum[n][2 * l] = fma(weight[n], v.a, sum[n][2 * l]);
                sum[n][2 * l + 1] = fma(weight[n], v.b, sum[n][2 * l + 1]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int l = 0; l < 2 * L; ++l) store(sums + n * width + at * 32 + l * 16, sum[n][l]);
}

template <int64_t Kind, int N, int Lines, bool Fetches>
void gather(const Chunk& chunk, const char* head, int64_t cell_bytes, int64_t first, int64_t last,
            float* weights, float* sums, Fetcher& ahead) {
    constexpr int L = lines_at_once(N);
    if (Kind == kI8)  // each value's scale goes into its weight
        for (int64_t i = first; i < last; ++i) {
            float scale = Element<Kind>::scale(head + chunk.cells[i] * cell_bytes, chunk.dim);
            for (int n = 0; n < N; ++n) weights[n * kChunk + i] *= scale;
        }
    if constexpr (Lines > 0) {
        for (int64_t l = 0; l < Lines; l += L)
            gather_lines<Kind, N, least_lines(L, Lines), Lines, Fetches>(
                chunk, head, cell_bytes, first, last, weights, sums, l, 0, ahead);
    } else {
        int64_t whole = chunk.dim / 32, rest = chunk.dim % 32, l = 0;
        for (; l + L <= whole; l += L)
            gather_lines<Kind, N, L, Lines, Fetches>(chunk, head, cell_bytes, first, last, weights, sums, l, 0, ahead);
        for (; l < whole; ++l)
            gather_lines<Kind, N, 1, Lines, Fetches>(chunk, head, cell_bytes, first, last, weights, sums, l, 0, ahead);
        if (rest)
            gather_lines<Kind, N, 1, Lines, Fetches>(chunk, head, cell_bytes, first, last, weights, sums, l, rest, ahead);
    }
}

}  // namespace sgl::SGL_ISA
