// What a model's own lines compute between kernels.
#include "elements.h"

// out [rows, width], contiguous, = x plus (operation 0) or times (1) y, or the sigmoid of x (2). y is `scalar` where it is null,
// one element a row where y_width is 1, else [rows, width]; a stride of 0 is one row for all. out may be x.
#define SGL_ELEMENTWISE_ARGS(P, I, D) \
    P(x) I(x_stride) P(y) I(y_stride) I(y_width) D(scalar) P(out) I(rows) I(width) I(operation) I(type)
SGL_ARGS(ElementwiseArgs, SGL_ELEMENTWISE_ARGS)

namespace sgl::SGL_ISA {

namespace {

enum Operation : int64_t { kAdd = 0, kMultiply = 1, kSigmoid = 2 };

SGL_INLINE f32x16 computed(int64_t operation, f32x16 x, f32x16 y) {
    if (operation == kAdd) return add(x, y);
    if (operation == kMultiply) return mul(x, y);
    return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x))));
}

template <class T>
void compute_row(const ElementwiseArgs& args, int64_t row) {
    const T *x = row_of<T>(args.x, row, args.x_stride), *y = row_of<T>(args.y, row, args.y_stride);
    T* out = row_of<T>(args.out, row, args.width);
    bool is_whole = args.y != nullptr && args.y_width != 1;
    f32x16 other = set1(args.y == nullptr ? static_cast<float>(args.scalar) : as_float(*y));
    for (int64_t i = 0; i < args.width; i += 16) {
        int64_t left = args.width - i;
        if (is_whole) other = get(y + i, left);
        put(out + i, computed(args.operation, get(x + i, left), other), left);
    }
}

void elementwise(const ElementwiseArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        each_row(pool, args.rows, args.width, [&](int64_t row, int) { compute_row<decltype(element)>(args, row); });
    });
}

}  // namespace

SGL_KERNELS(operations_elementwise,
    SGL_KERNEL("elementwise", elementwise, ElementwiseArgs))

}  // namespace sgl::SGL_ISA
