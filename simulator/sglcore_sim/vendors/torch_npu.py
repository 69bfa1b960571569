"""torch_npu's operators as CPU references with the real schemas and the limits that the vendor
documents.

Calls that the real operator refuses raise RuntimeError here too; alignment and layouts are checked,
speed is not. Sources of the limits: docs/context of the repository Ascend/op-plugin, and the
documents of the underlying operators aclnnXxx in cann/ops-transformer. If versions differ, only
calls that all of them take are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore_sim.vendors.paged import attend, cells_of, require

HALF = (torch.float16, torch.bfloat16)
MASK = (2048, 2048)
ATTENTION = "npu_fused_infer_attention_score"
FRACTAL_NZ = 29
WIDEST = 65535
FLOATS = (*HALF, torch.float32)
SPARSE = "npu_sparse_flash_attention"


def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Implement npu_fused_infer_attention_score, the variant of the operator that allocates its
    results: return the attention, of the query's shape, and a placeholder, float32 zeros [1], for
    the log-sum-exp. Options and errors are those of `attention_out`."""
    out = torch.empty_like(query)
    lse = torch.zeros(1, dtype=torch.float32)
    attention_out(query, key, value, **given, out=[out, lse])
    return out, lse


def attention_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    out: list[Tensor],
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Implement npu_fused_infer_attention_score.out, the variant with the caller's buffers, over
    pages of a block table. It writes the attention to out[0] and returns both tensors of `out`;
    out[1] stays as it is. Layout BSND: decode, query [rows, 1, heads, dim]. TND: packed rows with
    the causal mask (sparse_mode 3), query [tokens, heads, dim]; `actual_seq_lengths` are their
    ends. `actual_seq_lengths_kv`: each row's number of keys; it and `block_table` must be given.
    Without them, in another layout (the default included), or in TND with another sparse mode, it
    raises NotImplementedError; a call beyond the operator's limits raises RuntimeError. Further
    options are ignored."""
    if block_table is None or actual_seq_lengths_kv is None or input_layout not in ("BSND", "TND"):
        raise NotImplementedError("this reference takes pages with lengths of the keys, in the layouts BSND and TND")
    packed = input_layout == "TND"
    _check(query, key, value, block_table, actual_seq_lengths_kv, num_heads, num_key_value_heads, block_size, packed)
    if packed and sparse_mode != 3:
        raise NotImplementedError("this reference takes packed rows with the causal mask only (sparse_mode 3)")
    require(ATTENTION, {"an output of the queries' shape, contiguous": _is_like(out[0], query)})
    hidden = None if packed else _mask_of_rows(atten_mask, sparse_mode, block_table, block_size)
    if packed:
        _check_mask(atten_mask)
        ends = [0, *_queries(actual_seq_lengths, actual_seq_lengths_kv, len(query))]
    else:
        ends = list(range(len(query) + 1))
    heads, dim = query.shape[-2:]
    keys, values = (pages.reshape(-1, num_key_value_heads or num_heads, dim) for pages in (key, value))
    rows = [
        (start, end, cells_of(block_table[row], actual_seq_lengths_kv[row], block_size))
        for row, (start, end) in enumerate(pairwise(ends))
        if end > start
    ]
    attend(
        out[0].view(-1, heads, dim), query.reshape(-1, heads, dim), rows, keys, values, scale, packed, -1, hidden=hidden
    )
    return out[0], out[1]


def _mask_of_rows(mask: Tensor | None, sparse_mode: int, table: Tensor, block_size: int) -> Tensor | None:
    """Return the mask of a decode as bool [rows, keys], true for keys that a row does not see; None
    without one. Raises RuntimeError for a mask that is not [rows, 1, keys] over all pages of the
    table, or another sparse mode than 0."""
    if mask is None:
        return None
    wanted = {
        "sparse_mode 0 with a mask of each row": sparse_mode == 0,
        "a mask of bool, int8 or uint8": mask.dtype in (torch.bool, torch.int8, torch.uint8),
        "a mask [rows, 1, pages of the table * block size]": mask.shape == (len(table), 1, table.shape[1] * block_size),
    }
    require(ATTENTION, wanted)
    return mask[:, 0].bool()


def _is_like(out: Tensor, query: Tensor) -> bool:
    return (out.shape, out.dtype, out.device) == (query.shape, query.dtype, query.device) and out.is_contiguous()


def _queries(ends: list[int] | None, lengths: list[int], tokens: int) -> list[int]:
    """Return the ends of packed rows, `ends`, as a list. Raises RuntimeError if they are missing or
    do not ascend to the number of tokens, if a row has more queries than keys (`lengths`), or if
    there are more than 4096 rows."""
    if not ends or sorted(ends) != list(ends) or ends[-1] != tokens:
        raise RuntimeError(f"{ATTENTION}: actual_seq_lengths {ends} must rise to the {tokens} packed tokens")
    counts = (end - start for start, end in pairwise([0, *ends]))
    fits = len(ends) <= min(len(lengths), 4096) and all(n <= keys for n, keys in zip(counts, lengths, strict=False))
    require(ATTENTION, {"no more queries than keys in a row, and at most 4096 rows": fits})
    return list(ends)


def _check_mask(mask: Tensor | None) -> None:
    if mask is None or tuple(mask.shape[-2:]) != MASK or mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        raise RuntimeError(f"{ATTENTION}: sparse_mode 2, 3 and 4 want a mask of {MASK}")
    if not torch.equal(mask.reshape(MASK).bool(), torch.ones(MASK, dtype=torch.bool).triu(1)):
        raise RuntimeError(f"{ATTENTION}: the compressed mask must hide what is above the diagonal, and nothing else")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    page: int,
    packed: bool,
) -> None:
    """Raise RuntimeError for a call beyond the documented limits of paged attention in half
    precision (aclnnFusedInferAttentionScoreV3). One query per row (`packed` False): page sizes that
    are multiples of 16 up to 512, and heads of a multiple of 16 up to 512. Packed rows: pages of
    128, and heads of 64 or 128, or of a multiple of 16 up to 256 if several query heads share a key
    head. `kv_heads` 0: `heads` of them. Mask and query ends are checked elsewhere."""
    rows, dim, kv_heads = table.shape[0], query.shape[-1], kv_heads or heads
    takes_dim = dim in (64, 128) or (heads != kv_heads and dim % 16 == 0 and dim <= 256)
    takes_page = page == 128 if packed else page % 16 == 0 and 16 <= page <= 512
    wanted = {
        "half precision of one kind": query.dtype in HALF and query.dtype == key.dtype,
        f"another head size than {dim}": takes_dim if packed else dim % 16 == 0 and dim <= 512,
        f"pages of another size than {page}": takes_page,
        "a block table of int32": table.dtype == torch.int32 and table.dim() == 2,
        "pages of shape [pages, size, heads * dim]": key.dim() == 3 and key.shape[1:] == (page, kv_heads * dim),
        f"at most {WIDEST} elements of a token's keys": kv_heads * dim <= WIDEST,
        "values of the shape and type of keys": value.shape == key.shape and value.dtype == key.dtype,
        "queries of num_heads heads": query.shape[-2] == heads,
        f"{rows} lengths that the table holds, not {lengths}": len(lengths) >= rows
        and all(0 <= length <= table.shape[1] * page for length in lengths),
        "at most 64 queries' heads to one of keys": heads % kv_heads == 0 and heads // kv_heads <= 64,
        "contiguous tensors": all(part.is_contiguous() for part in (query, key, value, table)),
    }
    if not packed:
        wanted["one query a row"] = query.dim() == 4 and query.shape[1] == 1 and len(query) == rows
    require(ATTENTION, wanted)


def attention_workspace(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """Implement the operator that sizes the workspace of attention_out: return uint8 zeros [512],
    which the reference does not use."""
    return torch.zeros(512, dtype=torch.uint8)


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Implement npu_rms_norm: return the norm, computed in float32 and cast once to the input's
    dtype, and the reciprocal root mean square, float32 [..., 1]. The mean is over the last
    dimension only. Raises RuntimeError for other dtypes or shapes than the operator's."""
    wanted = {
        "one dtype of floats": input.dtype == gamma.dtype and input.dtype in FLOATS,
        "a gamma of the last dimensions": input.shape[input.dim() - gamma.dim() :] == gamma.shape,
    }
    require("npu_rms_norm", wanted)
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(input.dtype), scale


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Implement npu_add_rms_norm: return the norm of x1 + x2, its reciprocal root mean square
    (float32), and the sum, in the input's dtype. Raises RuntimeError if x1 and x2 differ in shape
    or dtype, and where `rms_norm` does.
    """
    require("npu_add_rms_norm", {"two tensors of one shape and dtype": (x1.shape, x1.dtype) == (x2.shape, x2.dtype)})
    total = x1 + x2
    normed, scale = rms_norm(total, gamma, epsilon)
    return normed, scale, total


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Implement npu_swiglu: return silu of the first half of dimension `dim` times the second half,
    computed in float32 and cast to the input's dtype. Raises RuntimeError for an odd size or a
    dtype that is not a float."""
    wanted = {"floats": input.dtype in FLOATS, "two halves of one size": input.shape[dim] % 2 == 0}
    require("npu_swiglu", wanted)
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Implement npu_rotary_mul: return input * r1 + (-second, first) * r2 for the halves of each
    head of `input` [B, S, N, D]. r1 and r2 are cos and sin [B or 1, S, 1 or N, D]. Raises
    RuntimeError beyond the operator's limits, and for another mode than "half"; `rotate` is
    ignored."""
    four = all(x.dim() == 4 for x in (input, r1, r2))
    wanted = {
        "four dimensions in the mode 'half'": four and rotary_mode == "half",
        "one dtype of floats": input.dtype == r1.dtype == r2.dtype and input.dtype in FLOATS,
        "an even head below 896 elements": input.shape[-1] % 2 == 0 and input.shape[-1] < 896,
        "fewer than 1000 rows and heads": four and input.shape[0] < 1000 and input.shape[2] < 1000,
        "r1 and r2 of every token, as wide as a head": r1.shape == r2.shape
        and r1.shape[1:] in ((input.shape[1], 1, input.shape[3]), input.shape[1:])
        and r1.shape[0] in (1, input.shape[0]),
    }
    require("npu_rotary_mul", wanted)
    first, second = input.chunk(2, -1)
    return input * r1 + torch.cat((-second, first), -1) * r2


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Implement npu_scatter_pa_kv_cache: write the rows of key and value [rows, heads, dim] in
    place to the KV slots `slot_mapping` of pages [pages, size, heads, dim] in the plain layout, in
    the dtypes that an A2 or A3 supports. Raises NotImplementedError for another `cache_mode` than
    "Norm" or None, the default included, and RuntimeError for wrong shapes or dtypes. The other
    options are ignored."""
    if cache_mode not in (None, "Norm"):
        raise NotImplementedError("this reference stores pages in the plain layout only (cache_mode 'Norm')")
    parts = (key, value, key_cache, value_cache)
    wanted = {
        "one dtype, of half precision or int8": len({x.dtype for x in parts}) == 1 and key.dtype in (*HALF, torch.int8),
        "integer slots, one for each row": slot_mapping.dtype in (torch.int32, torch.int64)
        and slot_mapping.shape == key.shape[:1],
        "values of the rows and heads of keys": key.shape[:2] == value.shape[:2],
        "pages of 4 dimensions, of the heads of rows of 3": key.dim() == 3
        and key_cache.shape[2:] == key.shape[1:]
        and value_cache.shape[2:] == value.shape[1:],
        "contiguous tensors": all(x.is_contiguous() for x in (*parts, slot_mapping)),
    }
    require("npu_scatter_pa_kv_cache", wanted)
    slots = slot_mapping.long()
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


def format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Implement npu_format_cast: return a copy with the same values and dtype (both dtype options
    are ignored); the device's internal layout is not simulated. To FRACTAL_NZ it raises
    RuntimeError unless the dtype is a half precision and the last two sizes are multiples of 16."""
    if acl_format == FRACTAL_NZ and (input.dtype not in HALF or any(size % 16 for size in input.shape[-2:])):
        raise RuntimeError(f"npu_format_cast keeps {tuple(input.shape)} of {input.dtype} in whole blocks of 16 only")
    return input.clone()


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement npu_sparse_flash_attention: attend to the listed rows of a sequence, up to the
    list's first -1, in the absorbed form of MLA, where the keys are also the values. query [batch,
    S, heads, 512] and key [batch, K, 1, 512] are extended by their rotary parts of 64.
    `sparse_indices` [batch, S, 1, width] are positions in the row's own keys. The value, both
    lengths and both rotary parts must be given (AssertionError). Return the attention, of the
    query's shape, and two empty tensors. The defaults of both modes are refused: the layouts must
    be "BSND" with `sparse_mode` 0 (else NotImplementedError) and `attention_mode` 2 (else
    RuntimeError). Other calls beyond the operator's limits raise RuntimeError. Further options are
    ignored.
    """
    if (layout_query, layout_kv, sparse_mode) != ("BSND", "BSND", 0):
        raise NotImplementedError("this reference takes batches of texts, without a mask (sparse_mode 0)")
    given = actual_seq_lengths_query, actual_seq_lengths_kv, query_rope, key_rope
    assert value is not None and all(part is not None for part in given), "this reference takes all of them"
    lengths_query, lengths, turned, key_turned = (part for part in given if part is not None)
    require(SPARSE, {"the attention mode 2": attention_mode == 2})
    _check_sparse(query, key, value, sparse_indices, (lengths_query, lengths), (turned, key_turned))
    queries, keys = (torch.cat(parts, -1).float() for parts in ((query, turned), (key, key_turned)))
    out = torch.empty_like(query)
    for row, (length, lists) in enumerate(zip(lengths.tolist(), sparse_indices[:, :, 0], strict=True)):
        for place, chosen in enumerate(lists):
            seen = chosen[: int((chosen >= 0).int().cumprod(0).sum())].long()
            # In a capture all integers may be 0.
            require(SPARSE, {"places that the text has": not len(seen) or int(seen.max()) < max(length, 1)})
            scores = queries[row, place] @ keys[row, seen, 0].T * scale_value
            out[row, place] = (scores.softmax(-1) @ value[row, seen, 0].float()).to(out.dtype)
    return out, torch.empty(0), torch.empty(0)


def _check_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    lengths: tuple[Tensor, Tensor],
    turned: tuple[Tensor, Tensor],
) -> None:
    batch, count, heads, _ = query.shape
    parts = (query, key, value, *turned)
    is_chosen = chosen >= 0
    wanted = {
        "something in every tensor": all(part.numel() for part in (*parts, chosen, *lengths)),
        "one type of half precision": len({part.dtype for part in parts}) == 1 and query.dtype in HALF,
        "1, 2, 4, ... or 128 heads": heads & (heads - 1) == 0 and heads <= 128,
        "one head of keys, of 512 elements": key.shape[2:] == (1, 512) and query.shape[3] == 512,
        "64 elements that hold a place": turned[0].shape == (*query.shape[:3], 64)
        and turned[1].shape == (*key.shape[:3], 64),
        "values that are the keys": value.shape == key.shape and value.data_ptr() == key.data_ptr(),
        "int32 places, a list for each query": chosen.dtype == torch.int32 and chosen.shape[:3] == (batch, count, 1),
        "lists that are filled up behind the rest": not bool((is_chosen[..., 1:] & ~is_chosen[..., :-1]).any()),
        "int32 lengths of queries and keys, one for each batch": all(
            each.dtype == torch.int32 and each.shape == (batch,) for each in lengths
        ),
        "lengths that queries and keys have": int(lengths[0].max()) <= count
        and int(lengths[1].min()) >= 0
        and int(lengths[1].max()) <= key.shape[1],
        "contiguous tensors": all(part.is_contiguous() for part in (*parts, chosen, *lengths)),
    }
    require(SPARSE, wanted)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        ATTENTION: attention,
        f"{ATTENTION}.out": attention_out,
        f"_{ATTENTION}_get_max_workspace": attention_workspace,
        "npu_rms_norm": rms_norm,
        "npu_add_rms_norm": add_rms_norm,
        "npu_swiglu": swiglu,
        "npu_rotary_mul": rotary_mul,
        "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
        "npu_format_cast": format_cast,
        SPARSE: sparse_attention,
    }
)
"""References by the operator's name in the namespace `npu`."""
SHAPED = ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_scatter_pa_kv_cache")
"""Operators for which the extension also has a Meta kernel, so that they can be traced; their
references read no values."""


def plant(sim: Any) -> None:
    """Register the extension's operators with their schemas, for torch.ops.npu, and declare to the
    simulator `sim` the argument that `npu_fused_infer_attention_score.out` writes without marking
    it."""
    library()
    sim.declare_writes(f"npu::{ATTENTION}.out", "out")


@cache
def library() -> torch.library.Library:
    """Register the operators of REFERENCES and the schemas of all others in the namespace `npu`,
    once per process, and return the library that holds them; an operator without a reference cannot
    be run."""
    made = torch.library.Library("npu", "FRAGMENT")
    for schema in stored_schemas().values():
        made.define(schema)
    for name, reference in REFERENCES.items():
        made.impl(name, reference, "CPU")
    for name in SHAPED:
        made.impl(name, REFERENCES[name], "Meta")
    return made


def stored_schemas() -> Mapping[str, str]:
    """Return the schemas of the real extension's operators, as stored in the package, by name with
    overload ("name.out"), both without the namespace."""
    lines = (files("sglcore_sim") / "data" / "npu_schemas.txt").read_text().splitlines()
    schemas = (line.removeprefix("npu::") for line in lines if "(" in line)
    return MappingProxyType({schema.partition("(")[0]: schema for schema in schemas})
