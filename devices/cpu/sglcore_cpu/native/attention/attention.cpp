#include "kernel_list.h"

namespace sgl::SGL_ISA {

static const Kernel kernels[] = {
    SGL_KERNEL("paged_decode", paged_decode, DecodeArgs),
    SGL_KERNEL("paged_prefill", paged_prefill, PrefillArgs),
    SGL_KERNEL("store_kv_int8", store_kv_int8, StoreInt8Args),
};

extern const KernelList attention_kernels;
const KernelList attention_kernels = {kernels, 3};

}  // namespace sgl::SGL_ISA
