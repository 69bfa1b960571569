"""Kernel calls that `kernel_budgets.py` compiles ahead of time, with shapes of supported models, in
every dtype that is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from sglcore.conformance.inputs.sampling_state import make_state
from sglcore.runtime.attention import triton_decode, triton_extend
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.triton import (
    activation,
    cells,
    convolution,
    delta_rule,
    draft_trees,
    draft_verification,
    experts,
    grouped_product,
    hyper,
    norm_kernels,
    race,
    rotated_store,
    rotation,
    routing,
    sampling,
    softmax,
    state_space,
)
from sglcore.runtime.kernels.triton.sparse import (
    compressor,
    hisparse,
    indexer,
    latent_rows,
    pool_rows,
    sparse_attention,
    sparse_plan,
)
from sglcore.runtime.kernels.triton.tuning import LaunchConfig, Option, Tuning
from sglcore.sampling.gumbel_race import make_race_tables
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch

KERNELS: tuple[ModuleType, ...] = (
    *(
        activation,
        cells,
        sampling,
        experts,
        norm_kernels,
        draft_verification,
        race,
        rotated_store,
        rotation,
        routing,
        draft_trees,
    ),
    *(convolution, delta_rule, state_space),
    *(hisparse, hyper, latent_rows, sparse_plan),
    *(compressor, grouped_product, indexer, pool_rows, softmax, sparse_attention),
    *(triton_decode, triton_extend),
)
"""The modules with kernels."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAGE, CELLS, TOKENS = 16, 64, 64
ATTENTION: tuple[tuple[torch.dtype, int, dict[str, Any], tuple[int, ...]], ...] = (
    (BF16, 128, {}, (1, 16)),
    (BF16, 64, {"sliding_window": 4096}, (1, 16)),
    (BF16, 256, {}, (16,)),
    (BF16, 256, {"softcap": 50.0}, (16,)),
    (BF16, 64, {"sinks": torch.empty(32, dtype=BF16)}, (16,)),
    (F16, 128, {}, (16,)),
    (F32, 64, {}, (16,)),
)
"""(dtype, head size, further arguments of the layer, maximum numbers of chunks); bfloat16 in every
variant, the others once."""

LATENT: tuple[tuple[torch.dtype, int, RowCodec | None, int, int, int], ...] = (
    (BF16, 512, None, 64, 640, 4),
    (BF16, 512, None, 64, 640, 1024),
    (BF16, 512, RowCodec(512, exact=64), 64, 640, 4),
    (BF16, 576, None, 128, 2048, 4),
    (BF16, 576, None, 128, 0, 4),
    (BF16, 576, RowCodec(576, exact=64), 16, 2048, 4),
    (F16, 512, None, 64, 640, 4),
    (F32, 512, None, 64, 640, 4),
)
"""(dtype, elements of a KV entry, its codec, heads, selected entries per token or 0 for all of its
request, tokens). Entries of 512 elements are DeepSeek-V4's: 128 in a window, the others compressed,
with sinks; those of 576 are V3's."""

Cases = dict[str, Callable[[], object]]


def cases(tuning: Tuning) -> Cases:
    """Return every case by name. Entries in 8 bits have the float format that the device converts
    in hardware, if any."""
    every: Cases = {}
    for dtype in (BF16, F16, F32):
        every |= {f"{name} {str(dtype)[6:]}": case for name, case in _elementwise(dtype, tuning).items()}
    for dtype, dim, asked, chunks in ATTENTION:
        layer = Attention(0, 32, 8, dim, 1.0, **asked)
        name = " with ".join((f"{str(dtype)[6:]} heads of {dim}", *asked)).replace("sliding_", "")
        for count in chunks:
            every[f"decode {name} in {count}"] = partial(_decode, dtype, layer, count, tuning)
        every[f"extend {name}"] = partial(_extend, dtype, layer, tuning)
    for dtype, size, codec, heads, width, tokens in LATENT:
        form = f"{str(dtype)[6:]} rows of {size}{' in 8 bits' if codec else ''}"
        name = f"{'chosen' if width else 'paged'} {form} of {heads} heads and {tokens} tokens"
        every[name] = partial(_mqa, dtype, size, codec, heads, width, tokens, tuning)
    for dtype in (BF16, F32):
        every |= {f"{name} {str(dtype)[6:]}": case for name, case in _indexer(dtype, tuning).items()}
    every |= _small_tiles(tuning)
    for dtype in (BF16, F32):
        every |= {f"{name} {str(dtype)[6:]}": case for name, case in _recurrent(dtype, tuning).items()}
    for dtype, tokens in ((BF16, 4), (BF16, 1024), (BF16, 16384), (F16, 1024), (F32, 4)):
        every[f"experts {str(dtype)[6:]} of {tokens} tokens"] = partial(_experts, dtype, tokens, tuning)
    every |= {f"{name} bfloat16": case for name, case in (_latent(tuning) | _streams(tuning) | _lists(tuning)).items()}
    every |= {**_verification(tuning), **_swapping(tuning)}
    for tokens in (4, 1024):
        every[f"experts in 4 bits of {tokens} tokens"] = partial(_mxfp4_experts, tokens, tuning)
    for dtype in (BF16, F32):
        every[f"draw {str(dtype)[6:]}"] = partial(_draw, dtype, SamplingParams(), tuning)
        cut = SamplingParams(top_k=40, top_p=0.9, min_p=0.01)
        every[f"draw {str(dtype)[6:]} with cut-offs"] = partial(_draw, dtype, cut, tuning)
    return every


def bounded_cases(tuning: Tuning, options: Mapping[str, Option]) -> Cases:
    """Return a case of decode attention with a vendor's compiler options that limit registers per
    thread."""
    bounded = replace(tuning, decode=replace(tuning.decode, options=options))
    return {
        "decode bfloat16 heads of 128 with bounded registers": partial(
            _decode, BF16, Attention(0, 32, 8, 128, 1.0), 16, bounded
        )
    }


def _elementwise(dtype: torch.dtype, tuning: Tuning) -> Cases:
    x, wide = torch.empty(TOKENS, 4096, dtype=dtype), torch.empty(TOKENS, 28672, dtype=dtype)
    heads, gain = torch.empty(TOKENS, 32, 128, dtype=dtype), torch.empty(4096, dtype=dtype)
    q, k, v = torch.empty(TOKENS, 6144, dtype=dtype).split([4096, 1024, 1024], dim=1)
    cache, where = torch.empty(CELLS, 8, 128, dtype=dtype), torch.empty(TOKENS, dtype=torch.int64)
    ints, angles = torch.empty(TOKENS, dtype=torch.int32), torch.empty(256, 128)
    kv, caches = torch.empty(TOKENS, 8, 128, dtype=dtype), (cache, cache)
    return {
        "norm": lambda: norm_kernels.rms_norm(x, gain, 1e-5, tuning),
        "head norm": lambda: norm_kernels.rms_norm(heads, gain[:128], 1e-5, tuning),
        "add and norm": lambda: norm_kernels.add_rms_norm(x, x, gain, 1e-5, tuning),
        "activation": lambda: activation.silu_and_mul(wide, tuning),
        "rotary": lambda: rotation.rotary(q, k, ints, angles, 128, tuning),
        "partial rotary": lambda: rotation.rotary(q, k, ints, angles[:, :64].contiguous(), 128, tuning),
        "rotary and store": lambda: rotated_store.rotary_and_store(q, k, v, ints, angles, 128, *caches, where, tuning),
        "partial rotary and store": lambda: rotated_store.rotary_and_store(
            q, k, v, ints, angles[:, :64].contiguous(), 128, *caches, where, tuning
        ),
        "routing": lambda: routing.top_k_routing(x[:, :128], 8, True, tuning),
        "plain routing": lambda: routing.top_k_routing(x[:, :128], 8, False, tuning),
        "store": lambda: cells.store_kv(kv, kv, cache, cache, where, tuning),
        "cells": lambda: cells.cache_locations(ints.view(4, 16), ints, ints, PAGE, where, tuning),
    }


def _recurrent(dtype: torch.dtype, tuning: Tuning) -> Cases:
    """Recurrent layers of Qwen3-Next, and of Granite 4 with Mamba 2."""
    ints = torch.empty(4, dtype=torch.int32)
    x, taps = torch.empty(TOKENS, 8192, dtype=dtype), torch.empty(4, 8192, dtype=dtype)
    tails, gains = torch.empty(CELLS, 3, 8192, dtype=dtype), torch.empty(1, 128, dtype=dtype)
    heads, by_head = torch.empty(TOKENS, 32, dtype=dtype), torch.empty(32)
    delta, scan = torch.empty(CELLS, 32, 128, 128), torch.empty(CELLS, 48, 64, 128)
    conv = x, taps, None, True, tails, ints
    rule = x, heads, heads, by_head, by_head, delta, ints
    space = torch.empty(TOKENS, 3328, dtype=dtype), heads, by_head, by_head, by_head, 0.0, 1.0, scan, ints
    return {
        "convolution": lambda: convolution.causal_conv(*conv, None, None, None, tuning),
        "convolution of prompts": lambda: convolution.causal_conv(*conv, ints, ints, ints, tuning),
        "delta rule": lambda: delta_rule.gated_delta_rule(*rule, None, None, None, tuning),
        "delta rule of prompts": lambda: delta_rule.gated_delta_rule(*rule, ints, ints, ints, tuning),
        "selective scan": lambda: state_space.selective_scan(*space, None, None, None, tuning),
        "selective scan of prompts": lambda: state_space.selective_scan(*space, ints, ints, ints, tuning),
        "gated norm": lambda: norm_kernels.gated_rms_norm(x, x, gains, 1e-6, False, tuning),
    }


def _latent(tuning: Tuning) -> Cases:
    """Latent KV entries of DeepSeek-V4 and V3.2, and index keys."""
    heads, x, angles = (
        torch.empty(TOKENS, 64, 512, dtype=BF16),
        torch.empty(TOKENS, 576, dtype=BF16),
        torch.empty(256, 64),
    )
    ints, where, gain = torch.empty(TOKENS, dtype=torch.int32), torch.empty(TOKENS, dtype=torch.int64), torch.empty(512)
    latent, index = (_own(each, tuning) for each in (RowCodec(512, exact=64), RowCodec(128, group=128)))
    bytes_of = {each: torch.empty(CELLS, each.num_bytes, dtype=torch.uint8) for each in (latent, index)}
    key = x[:, :128], gain[:128], gain[:128], 1e-6, ints, angles
    return {
        "rotated heads": lambda: latent_rows.rope_tail(heads, ints, angles, 1e-6, False, tuning),
        "heads rotated back": lambda: latent_rows.rope_tail(heads, ints, angles, None, True, tuning),
        "latent rows": lambda: latent_rows.norm_rope_store(x, gain, 1e-6, ints, angles, x, where, None, tuning),
        "latent rows in 8 bits": lambda: latent_rows.norm_rope_store(
            x[:, :512], gain, 1e-6, ints, angles, bytes_of[latent], where, latent, tuning
        ),
        "index keys": lambda: latent_rows.index_key_store(*key, x[:, :128], where, None, tuning),
        "index keys in 8 bits": lambda: latent_rows.index_key_store(*key, bytes_of[index], where, index, tuning),
    }


def _streams(tuning: Tuning) -> Cases:
    """The four residual streams of DeepSeek-V4 (hyper-connections), its routing and its experts."""
    h, fn = torch.empty(TOKENS, 4, 4096, dtype=BF16), torch.empty(24, 16384)
    floats, comb = torch.empty(24), torch.empty(TOKENS, 4, 4)
    logits, ints = torch.empty(TOKENS, 256, dtype=BF16), torch.empty(TOKENS, dtype=torch.int32)
    hidden, weights = torch.empty(1024, 256, dtype=BF16), torch.empty(1024, 6, dtype=BF16)
    w13, w2 = torch.empty(64, 512, 256, dtype=BF16), torch.empty(64, 256, 256, dtype=BF16)
    table = torch.empty(CELLS, 6, dtype=torch.int32)
    return {
        "streams": lambda: hyper.hc_pre(h, fn, floats, floats, 1e-6, 1e-6, 20, tuning),
        "last streams": lambda: hyper.hc_head(h, fn[:4], floats, floats, 1e-6, 1e-6, tuning),
        "streams again": lambda: hyper.hc_post(h[:, 0], h, comb[:, 0], comb, tuning),
        "routing by roots": lambda: routing.sqrtsoftplus_routing(logits, torch.empty(256), 6, 1.5, tuning),
        "routing by tokens": lambda: routing.hash_routing(logits, ints, table, 1.5, tuning),
        "limited activation": lambda: activation.limited_silu_and_mul(hidden, 10.0, tuning),
        "limited experts": lambda: experts.limited_moe(hidden, weights, weights.int(), w13, w2, 10.0, tuning),
    }


def _lists(tuning: Tuning) -> Cases:
    """Plans of DeepSeek-V4's attention: sliding windows, and blocks of 128 and of 4 tokens."""
    ints, table = torch.empty(TOKENS, dtype=torch.int32), torch.empty(CELLS, 64, dtype=torch.int32)
    pool_rows, out = ints[:4], torch.empty(TOKENS, 128, dtype=torch.int32)
    where = torch.empty(TOKENS, dtype=torch.int64)
    plan = sparse_plan.compress_plan
    return {
        "window": lambda: sparse_plan.window_rows(table, ints, ints, 128, 256, out, tuning),
        "blocks": lambda: sparse_plan.block_rows(table, ints, ints, 128, 256, out, tuning),
        "plan of prompts": lambda: plan(
            pool_rows,
            pool_rows,
            pool_rows,
            pool_rows,
            ints,
            ints,
            table,
            table,
            pool_rows,
            256,
            4,
            8,
            out[:20, :8],
            ints,
            where,
            where,
            tuning,
        ),
        "plan": lambda: plan(
            ints, ints, None, None, ints, ints, table, None, None, 256, 128, 128, out, ints, where, where, tuning
        ),
    }


def _verification(tuning: Tuning) -> Cases:
    """Verification of four requests with a root and three draft tokens each, of at most seven."""
    last, table, ints = (
        torch.empty(CELLS, dtype=torch.int32),
        torch.empty(CELLS, 7, dtype=torch.int32),
        torch.empty(4, dtype=torch.int32),
    )
    wide, runs = torch.empty(16, dtype=torch.int32), torch.empty(4, 4, dtype=torch.int32)
    tables, inputs = (last, last, table), (wide, wide, wide, wide)
    draft_trees = torch.empty(4, CELLS, 8, dtype=torch.int32), *tables, runs
    return {
        "placed proposals": lambda: draft_verification.place_proposals(*tables, ints, ints, None, *inputs, tuning),
        "placed proposals with masks": lambda: draft_verification.place_proposals(
            *tables, ints, ints, ints, *inputs, tuning
        ),
        "accepted proposals": lambda: draft_verification.accept_proposals(
            wide, wide, ints, ints, *tables, runs, tuning
        ),
        "walked trees": lambda: draft_verification.tree_walk(wide, wide, ints, ints, *draft_trees, runs, tuning),
        **_trees(tuning),
    }


def _trees(tuning: Tuning) -> Cases:
    """Draft trees of four requests: 8 nodes from 3 beams of depth 4, and 32 nodes from 16 beams of
    depth 3."""
    cases: Cases = {}
    for width, depth, nodes in ((3, 4, 8), (16, 3, 32)):
        most = width + (depth - 1) * width**2
        tokens, parents, beams, slots = (_ints(*each) for each in ((4 * width, width), (4, width), (3, 4, width), (4,)))
        records, tree, whole = (_ints(*each) for each in ((2, 4, most), (4, nodes - 1), (3, 4, nodes - 1)))
        held, depths = (_ints(4, CELLS, nodes), _ints(CELLS, nodes - 1)), _ints(most)
        scores, sums, reached = (torch.empty(each) for each in ((4 * width, width), (4, most), (4, width)))
        made, name = (records, sums, beams, reached), f"{width} beams"
        cases |= {
            f"{name} of roots": partial(draft_trees.tree_expand, tokens[:4], scores[:4], None, None, 0, *made, tuning),
            name: partial(draft_trees.tree_expand, tokens, scores, parents, reached, width, *made, tuning),
            f"trees of {name}": partial(draft_trees.tree_build, records, sums, depths, whole, tuning),
            f"{nodes} nodes placed": partial(draft_trees.tree_place, tree, tree, tree, slots, *held, tuning),
        }
    return cases


def _ints(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.int32)


def _swapping(tuning: Tuning) -> Cases:
    """hisparse with the selections of DeepSeek-V4 and V3.2; buffers hold twice the selection."""
    cases: Cases = {}
    for count, size in ((512, 512), (2048, 576)):
        chosen, ints = torch.empty(4, count, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        held, where = torch.empty(5, 2 * count, dtype=torch.int32), torch.empty(5, 32769, dtype=torch.int32)
        loads, pool_rows = torch.empty(2, 4, count, dtype=torch.int32), torch.empty(CELLS, size, dtype=BF16)
        given = chosen, ints, held, 64, held, held, where, chosen, loads, ints, tuning
        cases[f"swap in {count}"] = partial(hisparse.swap_in, *given)
        cases[f"copy {count} rows of {size}"] = partial(hisparse.copy_rows, pool_rows, pool_rows, loads, ints, tuning)
    return cases


def _pool(dtype: torch.dtype, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cache = torch.empty(CELLS, 8, dim, dtype=dtype)
    return cache, cache, torch.empty(4, 64, dtype=torch.int32)


def _decode(dtype: torch.dtype, layer: Attention, most: int, tuning: Tuning) -> None:
    q, ints = torch.empty(4, 32 * layer.head_dim, dtype=dtype), torch.empty(4, dtype=torch.int32)
    out = torch.empty_like(q)
    chunks = triton_decode.Chunks(tuning.decode_tokens, most)
    triton_decode.attend_singles(q, *_pool(dtype, layer.head_dim), PAGE, ints, ints, out, chunks, layer, tuning)


def _extend(dtype: torch.dtype, layer: Attention, tuning: Tuning) -> None:
    q, ints = torch.empty(128, 32 * layer.head_dim, dtype=dtype), torch.empty(4, dtype=torch.int32)
    out = torch.empty_like(q)
    triton_extend.attend_rows(q, *_pool(dtype, layer.head_dim), PAGE, ints, ints, ints, ints, 64, out, layer, tuning)


def _mqa(
    dtype: torch.dtype, size: int, codec: RowCodec | None, heads: int, width: int, tokens: int, tuning: Tuning
) -> None:
    q, ints = torch.empty(tokens, heads, size, dtype=dtype), torch.empty(tokens, dtype=torch.int32)
    codec = codec and _own(codec, tuning)
    pool = torch.empty(CELLS, codec.num_bytes, dtype=torch.uint8) if codec else torch.empty(CELLS, size, dtype=dtype)
    window, chosen = (torch.empty(tokens, each, dtype=torch.int32) for each in (128, width))
    form = 1.0, 512, codec, tuning
    if not width:
        sparse_attention.paged_mqa(q, pool, ints.view(1, tokens).expand(4, tokens), ints, ints, PAGE, *form)
    elif size == 512:
        sparse_attention.sparse_mqa(q, pool, window, pool, chosen[:, 128:].contiguous(), torch.empty(heads), *form)
    else:
        sparse_attention.sparse_mqa(q, pool, chosen, None, None, None, *form)


def _small_tiles(tuning: Tuning) -> Cases:
    """DeepSeek-V4's attention over one list, half of the heads at a time, and its compressors, 8
    tokens at a time: programs that leave half of the registers and of the shared memory to others.
    """
    tuning = replace(tuning, compress_tokens=8, compress_elements=1024, compress=LaunchConfig(64, 1))
    tuning = replace(tuning, sparse_heads=32, sparse_mqa=LaunchConfig(256, 1))
    q, listed, sinks = torch.empty(4, 64, 512, dtype=BF16), torch.empty(4, 640, dtype=torch.int32), torch.empty(64)
    codec = _own(RowCodec(512, exact=64), tuning)
    pools = {"": torch.empty(CELLS, 512, dtype=BF16), " in 8 bits": torch.empty(CELLS, codec.num_bytes).byte()}
    every: Cases = {
        f"one list of bfloat16 rows of 512{form}": partial(
            sparse_attention.sparse_mqa, q, pool, listed, None, None, sinks, 1.0, 512, codec if form else None, tuning
        )
        for form, pool in pools.items()
    }
    compressors = _indexer(BF16, tuning).items()
    return every | {f"{name} by 8 bfloat16": case for name, case in compressors if name.startswith("blocks")}


def _own(codec: RowCodec, tuning: Tuning) -> RowCodec:
    """Return the codec with the float format that the device converts in hardware, if any."""
    return codec if tuning.float8 is None else replace(codec, float8=tuning.float8)


def _indexer(dtype: torch.dtype, tuning: Tuning) -> Cases:
    """The indexer and the compressors of DeepSeek-V4, and the grouped part of its output
    projection."""
    q, ints = torch.empty(4, 64, 128, dtype=dtype), torch.empty(4, dtype=torch.int32)
    keys, codes = torch.empty(CELLS, 128, dtype=dtype), torch.empty(CELLS, RowCodec(128).num_bytes, dtype=torch.uint8)
    asked = torch.empty(4, 16, dtype=torch.int32), ints, ints, PAGE
    every: Cases = {
        "index scores": lambda: indexer.index_logits(q, q[..., 0], keys, *asked, 1.0, 32768, None, tuning),
        "index choice": lambda: indexer.index_top_k(torch.empty(4, 32768), ints, *asked[:2], PAGE, 512, tuning),
        "grouped product": lambda: grouped_product.grouped_linear(
            torch.empty(4, 8, 4096, dtype=dtype), torch.empty(8, 1024, 4096, dtype=dtype), tuning
        ),
    }
    if dtype == BF16:
        every["index scores of 8 bits"] = lambda: indexer.index_logits(
            q, q[..., 0], codes, *asked, 1.0, 32768, _own(RowCodec(128), tuning), tuning
        )
    for ratio, span in ((4, 8), (128, 128)):
        columns = 512 * span // ratio
        new, state = torch.empty(TOKENS, 2 * columns, dtype=dtype), torch.empty(CELLS, 2 * columns)
        reads = torch.empty(4, span, dtype=torch.int32), torch.empty(TOKENS, dtype=torch.int64)
        every[f"blocks of {ratio} tokens"] = partial(
            compressor.compress, new, state, torch.empty(ratio, columns), *reads, tuning
        )
    return every


def _experts(dtype: torch.dtype, tokens: int, tuning: Tuning) -> None:
    hidden, ids = torch.empty(tokens, 256, dtype=dtype), torch.empty(tokens, 8, dtype=torch.int64)
    w13, w2 = torch.empty(128, 512, 256, dtype=dtype), torch.empty(128, 256, 256, dtype=dtype)
    experts.moe(hidden, hidden[:, :8].contiguous(), ids, w13, w2, tuning)


def _mxfp4_experts(tokens: int, tuning: Tuning) -> None:
    hidden, ids = torch.empty(tokens, 256, dtype=BF16), torch.empty(tokens, 4, dtype=torch.int64)
    each: list[torch.Tensor] = []
    for outputs in (512, 256):
        codes = torch.empty(32, outputs, 8, 16, dtype=torch.uint8)
        each += [codes, codes[..., 0].contiguous(), torch.empty(32, outputs, dtype=BF16)]
    given: list[Any] = [hidden, hidden[:, :4].contiguous(), ids, *each, 1.702, 7.0, tuning]
    experts.mxfp4_moe(*given)


def _draw(dtype: torch.dtype, params: SamplingParams, tuning: Tuning) -> None:
    logits, positions = torch.empty(4, 151_936, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    state = make_state(SamplingBatch.from_params([(params, 1)] * 4), positions)
    sampling.draw(logits, state, make_race_tables(151_936, "cpu"), tuning)
