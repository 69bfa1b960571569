"""Kernels in Triton, for any device that Triton compiles for. What differs between devices is data
(`Tuning`).

Needs the library `triton`, which nothing else in the core imports. Under `TRITON_INTERPRET=1`, set
before this package is imported, the same kernels run on the host.

The docstring of a kernel names the `KernelTable` entry that defines its arguments, says what one
program computes, and the least memory traffic that the operation needs ("Reads at least ...").
`x_stride` is the distance in elements between the rows of `x`; capitals are compile-time constants,
and `ROWS`, `COLUMNS` and `BLOCK` are the tile of one program.
"""

from __future__ import annotations

from sglcore.runtime.attention.contract import Unavailable

try:
    import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise Unavailable(f"its kernels need the library triton ({error}); pip install triton") from error

from functools import partial

from sglcore.runtime.kernels.table import KernelTable, Limited
from sglcore.runtime.kernels.triton.activation import gelu_tanh_and_mul, limited_silu_and_mul, silu_and_mul
from sglcore.runtime.kernels.triton.cells import cache_locations, store_kv
from sglcore.runtime.kernels.triton.convolution import causal_conv
from sglcore.runtime.kernels.triton.delta_rule import gated_delta_rule
from sglcore.runtime.kernels.triton.draft_trees import tree_build, tree_expand, tree_place
from sglcore.runtime.kernels.triton.draft_verification import accept_proposals, place_proposals, tree_walk
from sglcore.runtime.kernels.triton.experts import clamped_moe, limited_moe, moe, mxfp4_moe
from sglcore.runtime.kernels.triton.grouped_product import grouped_linear
from sglcore.runtime.kernels.triton.hyper import hc_head, hc_post, hc_pre
from sglcore.runtime.kernels.triton.norm_kernels import add_rms_norm, gated_rms_norm, rms_norm
from sglcore.runtime.kernels.triton.rotated_store import rotary_and_store
from sglcore.runtime.kernels.triton.rotation import rotary
from sglcore.runtime.kernels.triton.routing import hash_routing, sqrtsoftplus_routing, top_k_routing
from sglcore.runtime.kernels.triton.sampling import draw
from sglcore.runtime.kernels.triton.sparse.compressor import compress
from sglcore.runtime.kernels.triton.sparse.hisparse import copy_rows, swap_in
from sglcore.runtime.kernels.triton.sparse.indexer import index_logits, index_top_k
from sglcore.runtime.kernels.triton.sparse.latent_rows import index_key_store, norm_rope_store, rope_tail
from sglcore.runtime.kernels.triton.sparse.sparse_attention import paged_mqa, sparse_mqa, takes_values
from sglcore.runtime.kernels.triton.sparse.sparse_plan import block_rows, compress_plan, window_rows
from sglcore.runtime.kernels.triton.state_space import selective_scan
from sglcore.runtime.kernels.triton.tuning import LaunchConfig, Tuning

__all__ = ["LaunchConfig", "Tuning", "triton_kernels"]


def triton_kernels(tuning: Tuning = Tuning()) -> KernelTable:
    """Return the reference table, with a Triton kernel for every entry that has one. `tuning` has
    the launch parameters of all of them.
    """
    entries = (rms_norm, add_rms_norm, rotary, rotary_and_store, silu_and_mul, gelu_tanh_and_mul, top_k_routing, moe)
    entries += (
        clamped_moe,
        mxfp4_moe,
        store_kv,
        cache_locations,
        draw,
        causal_conv,
        gated_delta_rule,
        selective_scan,
        gated_rms_norm,
        index_logits,
        index_top_k,
        compress,
        grouped_linear,
    )
    entries += (limited_moe, limited_silu_and_mul, sqrtsoftplus_routing, hash_routing, hc_pre, hc_post, hc_head)
    entries += (rope_tail, norm_rope_store, index_key_store, window_rows, block_rows, compress_plan)
    entries += (place_proposals, accept_proposals, tree_walk, tree_expand, tree_build, tree_place, swap_in, copy_rows)
    own = {entry.__name__: partial(entry, tuning=tuning) for entry in entries}
    latent = {each.__name__: Limited(partial(each, tuning=tuning), takes_values) for each in (sparse_mqa, paged_mqa)}
    return KernelTable().replace(**own, **latent)
