#include "recurrent.h"

namespace sgl::SGL_ISA {

namespace {

const Kernel kernels[] = {
    SGL_KERNEL("causal_conv", causal_conv, CausalConvArgs),
    SGL_KERNEL("gated_delta_rule", gated_delta_rule, DeltaRuleArgs),
    SGL_KERNEL("selective_scan", selective_scan, SelectiveScanArgs),
    SGL_KERNEL("gated_rms_norm", gated_rms_norm, GatedRmsNormArgs),
};

}  // namespace

extern const KernelList recurrent_kernels;
const KernelList recurrent_kernels = {kernels, sizeof(kernels) / sizeof(kernels[0])};

}  // namespace sgl::SGL_ISA
