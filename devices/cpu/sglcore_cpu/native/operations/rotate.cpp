// Rotary embedding (Su et al. 2021) of heads whose first half of the rotated part is paired with the second.
#include <algorithm>

#include "normed.h"
#include "elements.h"

// q and k rotated to q_out and k_out, v copied to v_out (none if v is null). k_out and v_out have `store_type` and are
// rows of a cache where `cells` is not null; else k_out's rows are those of k. Norms of each head before, where q_norm is
// not null, with weights of `norm_type`. cos_sin [.., rotary_dim] f32: cosines, then sines.
#define SGL_ROTATE_ARGS(P, I, D)                                                                               \
    P(q) I(q_stride) P(k) I(k_stride) P(v) I(v_stride) P(q_out) P(k_out) P(v_out) I(out_stride) P(cells)       \
    I(cells_bytes) P(positions) I(positions_bytes) P(cos_sin) I(cos_sin_stride) P(q_norm) P(k_norm) D(eps)     \
    I(tokens) I(q_heads) I(kv_heads) I(head_dim) I(rotary_dim) I(type) I(store_type) I(norm_type)
SGL_ARGS(RotateArgs, SGL_ROTATE_ARGS)

// Rows of x cast into rows of out, and of y into second, which may be null; row r goes to row cells[r] where cells is not
// null.
#define SGL_COPY_ROWS_ARGS(P, I, D)                                                                         \
    P(x) I(x_stride) P(y) I(y_stride) P(out) P(second) I(out_stride) P(cells) I(cells_bytes) I(rows) I(width) \
    I(type) I(out_type)
SGL_ARGS(CopyRowsArgs, SGL_COPY_ROWS_ARGS)

namespace sgl::SGL_ISA {

namespace {

template <class T>
void copy_cast(const T* x, T* out, int64_t width) {
    std::memcpy(out, x, static_cast<size_t>(width) * sizeof(T));
}
template <class T, class S>
void copy_cast(const T* x, S* out, int64_t width) {
    for (int64_t i = 0; i < width; i += 16) put(out + i, get(x + i, width - i), width - i);
}

// The angles of one token, cast to T and widened again: cosines, then sines.
template <class T>
void load_angles(const RotateArgs& args, int64_t token, float* angles) {
    const float* row = row_of<float>(args.cos_sin, index_at(args.positions, args.positions_bytes, token),
                                     args.cos_sin_stride);
    for (int64_t i = 0; i < args.rotary_dim; i += 16) {
        int64_t left = args.rotary_dim - i;
        put(angles + i, cast<T>(get(row + i, left)), left);
    }
}

// A head of T to one of S; every product and sum is cast to T.
template <class T, class S>
void rotate_head(const T* x, S* out, const float* angles, int64_t half, int64_t head_dim) {
    const float *cosines = angles, *sines = angles + half;
    for (int64_t i = 0; i < half; i += 16) {
        int64_t n = half - i;
        f32x16 a = get(x + i, n), b = get(x + half + i, n), cos = get(cosines + i, n), sin = get(sines + i, n);
        f32x16 first = sub(cast<T>(mul(a, cos)), cast<T>(mul(b, sin)));
        f32x16 second = add(cast<T>(mul(b, cos)), cast<T>(mul(a, sin)));
        put(out + i, cast<T>(first), n);
        put(out + half + i, cast<T>(second), n);
    }
    copy_cast(x + 2 * half, out + 2 * half, head_dim - 2 * half);
}

template <class T, class S>
void rotate_heads(const RotateArgs& args, const T* x, const void* weight, S* out, int64_t heads, float* memory) {
    int64_t size = args.head_dim;
    T* normed = reinterpret_cast<T*>(memory + args.rotary_dim);
    for (int64_t head = 0; head < heads; ++head) {
        const T* from = x + head * size;
        if (weight != nullptr) {
            float factor = norm_factor(sum_of_squares(from, size), size, args.eps);
            with_type(args.norm_type, [&](auto element) {
                norm_row(from, row_of<decltype(element)>(weight, 0, 0), normed, size, factor);
            });
            from = normed;
        }
        rotate_head(from, out + head * size, memory, args.rotary_dim / 2, size);
    }
}

template <class T, class S>
void rotate_token(const RotateArgs& args, int64_t token, float* memory) {
    int64_t cell = args.cells == nullptr ? token : index_at(args.cells, args.cells_bytes, token);
    load_angles<T>(args, token, memory);
    rotate_heads(args, row_of<T>(args.q, token, args.q_stride), args.q_norm,
                 row_of<T>(args.q_out, token, args.q_heads * args.head_dim), args.q_heads, memory);
    rotate_heads(args, row_of<T>(args.k, token, args.k_stride), args.k_norm,
                 row_of<S>(args.k_out, cell, args.out_stride), args.kv_heads, memory);
    if (args.v == nullptr) return;
    const T* v = row_of<T>(args.v, token, args.v_stride);
    copy_cast(v, row_of<S>(args.v_out, cell, args.out_stride), args.kv_heads * args.head_dim);
}

void rotate(const RotateArgs& args, Pool& pool) {
    int64_t width = (args.q_heads + 2 * args.kv_heads) * args.head_dim;
    auto bytes = static_cast<size_t>(args.rotary_dim + args.head_dim) * sizeof(float);
    with_type(args.type, [&](auto element) {
        with_type(args.store_type, [&](auto stored) {
            each_row(pool, args.tokens, 2 * width, [&](int64_t token, int thread) {
                auto* memory = static_cast<float*>(pool.scratch(thread, bytes));
                rotate_token<decltype(element), decltype(stored)>(args, token, memory);
            });
        });
    });
}

void copy_rows(const CopyRowsArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        with_type(args.out_type, [&](auto stored) {
            using T = decltype(element);
            using S = decltype(stored);
            each_row(pool, args.rows, args.width, [&](int64_t row, int) {
                int64_t cell = args.cells == nullptr ? row : index_at(args.cells, args.cells_bytes, row);
                copy_cast(row_of<T>(args.x, row, args.x_stride), row_of<S>(args.out, cell, args.out_stride), args.width);
                if (args.y == nullptr) return;
                copy_cast(row_of<T>(args.y, row, args.y_stride), row_of<S>(args.second, cell, args.out_stride), args.width);
            });
        });
    });
}

}  // namespace

SGL_KERNELS(operations_rotate,
    SGL_KERNEL("rotate", rotate, RotateArgs),
    SGL_KERNEL("copy_rows", copy_rows, CopyRowsArgs))

}  // namespace sgl::SGL_ISA
