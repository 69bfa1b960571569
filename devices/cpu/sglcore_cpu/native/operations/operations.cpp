#include "operations.h"

#include "elementwise.h"

namespace sgl::SGL_ISA {

namespace {

const Kernel kernels[] = {
    SGL_KERNEL("rms_norm", rms_norm, RmsNormArgs),
    SGL_KERNEL("add_rms_norm", add_rms_norm, AddRmsNormArgs),
    SGL_KERNEL("layer_norm", layer_norm, LayerNormArgs),
    SGL_KERNEL("silu_and_mul", silu_and_mul, ActivationArgs),
    SGL_KERNEL("limited_silu_and_mul", limited_silu_and_mul, LimitedActivationArgs),
    SGL_KERNEL("gelu_tanh_and_mul", gelu_tanh_and_mul, ActivationArgs),
    SGL_KERNEL("gelu", gelu, ActivationArgs),
    SGL_KERNEL("rotate", rotate, RotateArgs),
    SGL_KERNEL("copy_rows", copy_rows, CopyRowsArgs),
    SGL_KERNEL("embedding", embedding, EmbeddingArgs),
    SGL_KERNEL("cache_locations", cache_locations, CacheLocationsArgs),
    SGL_KERNEL("place_proposals", place_proposals, PlaceProposalsArgs),
    SGL_KERNEL("accept_proposals", accept_proposals, AcceptProposalsArgs),
    SGL_KERNEL("tree_expand", tree_expand, TreeExpandArgs),
    SGL_KERNEL("tree_build", tree_build, TreeBuildArgs),
    SGL_KERNEL("tree_place", tree_place, TreePlaceArgs),
    SGL_KERNEL("tree_walk", tree_walk, TreeWalkArgs),
    SGL_KERNEL("top_k_routing", top_k_routing, RoutingArgs),
    SGL_KERNEL("scored_routing", scored_routing, ScoredRoutingArgs),
    SGL_KERNEL("hash_routing", hash_routing, HashRoutingArgs),
    SGL_KERNEL("moe", moe, MoeArgs),
    SGL_KERNEL("elementwise", elementwise, ElementwiseArgs),
};

}  // namespace

extern const KernelList operations_kernels;
const KernelList operations_kernels = {kernels, sizeof(kernels) / sizeof(kernels[0])};

}  // namespace sgl::SGL_ISA
