// One row of logits in blocks, and how threads share out a row.
#pragma once

#include "pool.h"
#include "race.h"

namespace sgl::SGL_ISA {

constexpr int64_t kBlock = 256;
constexpr int64_t kGrain = 16;  // blocks of one part: 4096 tokens, some microseconds

SGL_INLINE f32x16 load16(const float* p) { return load(p); }
SGL_INLINE f32x16 load16(const bf16* p) { return load_bf16(p); }
SGL_INLINE f32x16 load16_first(const float* p, int64_t n) { return load_first(p, n); }
SGL_INLINE f32x16 load16_first(const bf16* p, int64_t n) { return load_bf16_first(p, n); }
SGL_INLINE float widened(float x) { return x; }
SGL_INLINE float widened(bf16 x) { return from_bf16(x); }
SGL_INLINE i32x16 load_i32_first(const int32_t* p, int64_t n) {
    int32_t lanes[16] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * 4);
    return load_i32(lanes);
}

// All threads for one row, or the calling one alone for a row of its own.
struct Workers {
    Pool* pool;  // null: alone

    template <class Body>
    void run(int64_t blocks, Body&& body) const {
        if (pool == nullptr) return body(int64_t{0}, blocks);
        pool->run(blocks, kGrain, [&](int64_t first, int64_t last, int) { body(first, last); });
    }
};

SGL_INLINE int64_t blocks_of(int64_t vocab) { return (vocab + kBlock - 1) / kBlock; }

template <class T>
struct Logits {
    const T* data;
    int64_t vocab;

    int64_t blocks() const { return blocks_of(vocab); }
    int64_t end(int64_t block) const { return block + 1 < blocks() ? (block + 1) * kBlock : vocab; }
    float at(int64_t id) const { return widened(data[id]); }

    // visit(id, sixteen logits, mask of those that exist) over a block; the others are 0.
    template <class Visit>
    __attribute__((always_inline)) void each(int64_t block, Visit&& visit) const {
        int64_t id = block * kBlock, last = end(block);
        for (; id + 16 <= last; id += 16) visit(id, load16(data + id), 0xffffu);
        if (id < last) visit(id, load16_first(data + id, last - id), (1u << (last - id)) - 1);
    }

    // The largest logit of a block, NaN if it holds one.
    float most(int64_t block) const {
        f32x16 most = set1(-INFINITY);
        uint32_t nan = 0;
        int64_t id = block * kBlock, last = end(block);
        for (; id + 16 <= last; id += 16) {
            f32x16 x = load16(data + id);
            nan |= nan_lanes(x);
            most = max(most, x);
        }
        float found = reduce_max(most);
        for (; id < last; ++id) {
            float x = at(id);
            nan |= x != x;
            found = x > found ? x : found;
        }
        return nan ? NAN : found;
    }

    // The first id of a block whose logit is `value`.
    int64_t find(int64_t block, float value) const {
        int64_t id = block * kBlock;
        while (at(id) != value) ++id;
        return id;
    }
};

}  // namespace sgl::SGL_ISA
