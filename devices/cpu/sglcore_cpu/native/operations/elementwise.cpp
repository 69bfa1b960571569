#include "elementwise.h"

#include "elements.h"

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

}  // namespace

void elementwise(const ElementwiseArgs& args, Pool& pool) {
    with_type(args.type, [&](auto element) {
        each_row(pool, args.rows, args.width, [&](int64_t row, int) { compute_row<decltype(element)>(args, row); });
    });
}

}  // namespace sgl::SGL_ISA
