// The topic's kernels, and which method serves a product.
#include "linear.h"

#include "product.h"

namespace sgl::SGL_ISA {
namespace {

using Method = void (*)(const Product&, Pool&);

// From this many tokens on a method serves products of the type.
struct Choice {
    int64_t type, tokens;
    Method method;
};

const Choice kChoices[] = {
    {kF32, 1, multiply_blocks},
    {kBF16, 1, multiply_blocks},
#if SGL_LEVEL >= 6
    {kBF16, 5, multiply_tiles},
#endif
};

void multiply(const Product& product, Pool& pool) {
    Method method = nullptr;
    for (const Choice& choice : kChoices)
        if (choice.type == product.type && choice.tokens <= product.tokens) method = choice.method;
    if (method != nullptr) method(product, pool);
}

template <class Args>
Product product_of(const Args& args, int64_t unit_panels, const Finish& finish) {
    Product product{};
    product.x = static_cast<const char*>(args.x), product.panels = static_cast<const char*>(args.panels);
    product.x_stride = args.x_stride, product.type = args.type;
    product.tokens = args.tokens, product.in_features = args.in_features;
    product.lines = panel_lines(args.type, args.in_features);
    product.unit_panels = unit_panels, product.units = ceil_div(args.out_features, kRows) / unit_panels;
    product.finish = finish;
    return product;
}

void linear(const LinearArgs& args, Pool& pool) {
    Finish finish{static_cast<char*>(args.out), args.out_stride, args.out_type, args.out_features, args.type == kBF16,
                  static_cast<const char*>(args.bias)};
    multiply(product_of(args, 1, finish), pool);
}

void linear_gated(const GatedArgs& args, Pool& pool) {
    Finish finish{static_cast<char*>(args.out), args.out_stride, args.type, args.out_features / 2, args.type == kBF16,
                  nullptr};
    multiply(product_of(args, 2, finish), pool);
}

}  // namespace

SGL_KERNELS(linear,
    SGL_KERNEL("linear", linear, LinearArgs),
    SGL_KERNEL("linear_gated", linear_gated, GatedArgs))

}  // namespace sgl::SGL_ISA
