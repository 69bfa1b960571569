// Products of activations with a quantised weight.
#pragma once

#include "args.h"
#include "weight.h"

namespace sgl::SGL_ISA::quantized {

// x times the weight's transpose, plus the bias.
void linear(const LinearQuantizedArgs& args, Pool& pool);
// silu(x gate) * (x up) [tokens, rows / 2] of a weight that is gate over up, rows a multiple of 32. The gate, its silu
// and up are rounded to the type of x.
void linear_gated(const LinearQuantizedArgs& args, Pool& pool);

}  // namespace sgl::SGL_ISA::quantized
