// Norms and rotations of latent rows, in float32 throughout (Su et al. 2021).
#include <algorithm>
#include <cmath>

#include "../operations/normed.h"
#include "rows.h"

// cos_sin f32 [.., rotary]: cosines, then sines. out [tokens, heads, size], each head of root mean square 1 if `norms`,
// its last `rotary` elements turned in pairs of neighbours.
#define SGL_ROPE_TAIL_ARGS(P, I, D)                                                                               \
    P(x) I(x_stride) I(x_head_stride) P(out) P(positions) P(cos_sin) I(cos_sin_stride) I(tokens) I(heads) I(size) \
    I(rotary) I(norms) D(eps) I(inverse) I(type)
SGL_ARGS(RopeTailArgs, SGL_ROPE_TAIL_ARGS)

// Row out_rows[t] = the norm of x[t], turned. Without a bias: the root mean square norm of the first `normed` elements, the
// last ones turned in pairs of neighbours; with one: the layer norm of all, the first ones turned in pairs half of
// `rotary` apart. weight and bias f32.
#define SGL_NORM_STORE_ARGS(P, I, D)                                                                              \
    P(x) I(x_stride) P(weight) P(bias) I(normed) D(eps) P(positions) P(cos_sin) I(cos_sin_stride) I(rotary)       \
    P(rows) I(row_stride) P(out_rows) I(index_bytes) I(tokens) I(size) I(type) I(row_type) I(exact) I(group)
SGL_ARGS(NormStoreArgs, SGL_NORM_STORE_ARGS)

namespace sgl::SGL_ISA {
namespace {

// Pairs of neighbours; cosines, then sines.
void turn_neighbours(float* x, const float* cos_sin, int64_t half, float sign) {
    for (int64_t i = 0; i < half; ++i) {
        float cos = cos_sin[i], sin = sign * cos_sin[half + i], even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cos - odd * sin;
        x[2 * i + 1] = even * sin + odd * cos;
    }
}

void turn_halves(float* x, const float* cos_sin, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        float cos = cos_sin[i], sin = cos_sin[half + i], low = x[i], high = x[half + i];
        x[i] = low * cos - high * sin;
        x[half + i] = high * cos + low * sin;
    }
}

template <class T>
void widen(const T* from, float* to, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) put(to + i, get(from + i, size - i), size - i);
}

void scale(float* x, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += 16) put(x + i, mul(get(x + i, size - i), set1(factor)), size - i);
}

// out = x in T.
template <class T, class S>
void narrow(const float* x, S* out, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) put(out + i, cast<T>(get(x + i, size - i)), size - i);
}

// Of at most 448; ties to even. Below 2^-6 there are steps of 2^-9, to which the addition rounds.
uint8_t float8(float x) {
    uint32_t bits, sign;
    std::memcpy(&bits, &x, 4);
    sign = bits >> 24 & 0x80, bits &= 0x7fffffff;
    if (bits < 0x3c800000) {
        float small = std::fabs(x) + 16384.0f;
        std::memcpy(&bits, &small, 4);
        return static_cast<uint8_t>(sign | (bits - 0x46800000));
    }
    bits = std::min<uint32_t>(bits + 0x7ffff + (bits >> 20 & 1), 0x43f00000);
    return static_cast<uint8_t>(sign | ((bits >> 20) - 0x3c0));
}

// x as codes, as rows.h has them; a scale is the least power of two that brings a group to 448.
template <class T>
void encode(const float* x, const Form& form, char* row) {
    int64_t codes = form.codes();
    for (int64_t first = 0; first < codes; first += form.group) {
        int64_t last = std::min(first + form.group, codes);
        f32x16 top = set1(1e-4f);
        for (int64_t i = first; i < last; i += 16) {
            f32x16 values = cast<T>(get(x + i, last - i));
            top = max(top, max(values, sub(zero(), values)));
        }
        float largest = reduce_max(top), inverse;
        uint32_t bits;
        std::memcpy(&bits, &largest, 4);
        uint32_t exponent = ((bits + 0x1fffff) >> 23) - 8, inverse_bits = (254 - exponent) << 23;
        std::memcpy(&inverse, &inverse_bits, 4);
        row[form.size + form.exact + first / form.group] = static_cast<char>(exponent);
        for (int64_t i = first; i < last; i += 16) {
            alignas(64) float scaled[16];
            store(scaled, mul(cast<T>(get(x + i, last - i)), set1(inverse)));
            for (int64_t lane = 0; lane < std::min<int64_t>(16, last - i); ++lane)
                row[i + lane] = static_cast<char>(float8(scaled[lane]));
        }
    }
    for (int64_t i = 0; i < form.exact; i += 16)
        put(reinterpret_cast<bf16*>(row + codes) + i, cast<T>(get(x + codes + i, form.exact - i)), form.exact - i);
}

void norm_first(const NormStoreArgs& args, float* x) {
    const auto* weight = static_cast<const float*>(args.weight);
    norm_row(x, weight, x, args.normed, norm_factor(sum_of_squares(x, args.normed), args.normed, args.eps));
}

void norm_layer(const NormStoreArgs& args, float* x) {
    const float *weight = static_cast<const float*>(args.weight), *bias = static_cast<const float*>(args.bias);
    f32x16 sum = zero(), squares = zero();
    for (int64_t i = 0; i < args.size; i += 16) sum = add(sum, get(x + i, args.size - i));
    float mean = reduce_add(sum) / static_cast<float>(args.size);
    for (int64_t i = 0; i < args.size; ++i) x[i] -= mean;
    for (int64_t i = 0; i < args.size; i += 16) squares = fma(get(x + i, args.size - i), get(x + i, args.size - i), squares);
    f32x16 factor = set1(norm_factor(reduce_add(squares), args.size, args.eps));
    for (int64_t i = 0; i < args.size; i += 16) {
        int64_t left = args.size - i;
        put(x + i, fma(mul(get(x + i, left), factor), get(weight + i, left), get(bias + i, left)), left);
    }
}

// Floor: x read and out written once.
void rope_tail(const RopeTailArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        auto bytes = static_cast<size_t>(args.size) * sizeof(float);
        each_row(pool, args.tokens * args.heads, 4 * args.size, [&](int64_t row, int thread) {
            int64_t token = row / args.heads, head = row % args.heads;
            auto* x = static_cast<float*>(pool.scratch(thread, bytes));
            widen(row_of<T>(args.x, token, args.x_stride) + head * args.x_head_stride, x, args.size);
            if (args.norms) scale(x, args.size, norm_factor(sum_of_squares(x, args.size), args.size, args.eps));
            const float* cos_sin = row_of<float>(args.cos_sin, i32_at(args.positions, token), args.cos_sin_stride);
            turn_neighbours(x + args.size - args.rotary, cos_sin, args.rotary / 2, args.inverse ? -1.0f : 1.0f);
            narrow<T>(x, row_of<T>(args.out, row, args.size), args.size);
        });
    });
}

// Floor: x read and its row written once.
void norm_store(const NormStoreArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        using T = decltype(element);
        auto bytes = static_cast<size_t>(args.size) * sizeof(float);
        each_row(pool, args.tokens, 6 * args.size, [&](int64_t token, int thread) {
            int64_t place = index_at(args.out_rows, args.index_bytes, token);
            auto* x = static_cast<float*>(pool.scratch(thread, bytes));
            widen(row_of<T>(args.x, token, args.x_stride), x, args.size);
            const float* cos_sin = row_of<float>(args.cos_sin, i32_at(args.positions, token), args.cos_sin_stride);
            if (args.bias == nullptr) {
                norm_first(args, x);
                turn_neighbours(x + args.size - args.rotary, cos_sin, args.rotary / 2, 1.0f);
            } else {
                norm_layer(args, x);
                turn_halves(x, cos_sin, args.rotary / 2);
            }
            if (args.row_type == kCodes) return encode<T>(x, Form::of(args), row_of<char>(args.rows, place, args.row_stride));
            with_type(args.row_type, [&](auto stored) {
                narrow<T>(x, row_of<decltype(stored)>(args.rows, place, args.row_stride), args.size);
            });
        });
    });
}

}  // namespace

SGL_KERNELS(sparse_rotate,
    SGL_KERNEL("rope_tail", rope_tail, RopeTailArgs),
    SGL_KERNEL("norm_store", norm_store, NormStoreArgs))

}  // namespace sgl::SGL_ISA
