// What a model's own lines compute between kernels.
#pragma once

#include "kernels.h"

// out [rows, width], contiguous, = x plus (operation 0) or times (1) y, or the sigmoid of x (2). y is `scalar` where it is null,
// one element a row where y_width is 1, else [rows, width]; a stride of 0 is one row for all. out may be x.
#define SGL_ELEMENTWISE_ARGS(P, I, D) \
    P(x) I(x_stride) P(y) I(y_stride) I(y_width) D(scalar) P(out) I(rows) I(width) I(operation) I(type)
SGL_ARGS(ElementwiseArgs, SGL_ELEMENTWISE_ARGS)

namespace sgl::SGL_ISA {

void elementwise(const ElementwiseArgs& args, Pool& pool);

}  // namespace sgl::SGL_ISA
