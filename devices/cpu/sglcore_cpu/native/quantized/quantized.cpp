// The topic's kernels.
#include "args.h"
#include "linear.h"
#include "pack.h"
#include "rows.h"

namespace sgl::SGL_ISA {

namespace {

const Kernel kKernels[] = {
    SGL_KERNEL("linear_quantized", quantized::linear, LinearQuantizedArgs),
    SGL_KERNEL("linear_quantized_gated", quantized::linear_gated, LinearQuantizedArgs),
    SGL_KERNEL("quantized_rows", quantized::quantized_rows, QuantizedRowsArgs),
    SGL_KERNEL("dequantize", quantized::dequantize, DequantizeArgs),
    SGL_KERNEL("pack_codes", quantized::pack_codes, PackCodesArgs),
    SGL_KERNEL("quantize_rows", quantized::quantize_rows, QuantizeRowsArgs),
};

}  // namespace

extern const KernelList quantized_kernels;
const KernelList quantized_kernels = {kKernels, sizeof(kKernels) / sizeof(kKernels[0])};

}  // namespace sgl::SGL_ISA
