// A quantised weight as plain numbers.
#pragma once

#include "args.h"
#include "weight.h"

namespace sgl::SGL_ISA::quantized {

void quantized_rows(const QuantizedRowsArgs& args, Pool& pool);
void dequantize(const DequantizeArgs& args, Pool& pool);

}  // namespace sgl::SGL_ISA::quantized
