#include "sparse.h"

namespace sgl::SGL_ISA {

namespace {

const Kernel kernels[] = {
    SGL_KERNEL("sparse_mqa", sparse_mqa, SparseMqaArgs),
    SGL_KERNEL("paged_mqa", paged_mqa, PagedMqaArgs),
    SGL_KERNEL("index_logits", index_logits, IndexLogitsArgs),
    SGL_KERNEL("index_top_k", index_top_k, IndexTopKArgs),
    SGL_KERNEL("compress", compress, CompressArgs),
    SGL_KERNEL("compress_plan", compress_plan, CompressPlanArgs),
    SGL_KERNEL("list_rows", list_rows, ListArgs),
    SGL_KERNEL("rope_tail", rope_tail, RopeTailArgs),
    SGL_KERNEL("norm_store", norm_store, NormStoreArgs),
    SGL_KERNEL("grouped_linear", grouped_linear, GroupedArgs),
    SGL_KERNEL("hc_pre", hc_pre, HcPreArgs),
    SGL_KERNEL("hc_post", hc_post, HcPostArgs),
};

}  // namespace

extern const KernelList sparse_kernels;
const KernelList sparse_kernels = {kernels, sizeof(kernels) / sizeof(kernels[0])};

}  // namespace sgl::SGL_ISA
