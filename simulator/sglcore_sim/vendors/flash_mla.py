"""FlashMLA (the module `flash_mla` of sgl-flash-mla 1.0.0): attention over listed rows as a CPU
reference with the real signature.

Sources of the preconditions: flash_mla/flash_mla_interface.py, csrc/api/sparse_prefill.cpp and the
kernels' assertions (sgl-project/FlashMLA). The legacy kernels support compute capability 9.0 and
10, the newer ones only 10 and rows of 512.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import adjacent, plant_module, require, together

CALL = "flash_mla.flash_mla_sparse_fwd"
STEP = 128
LOG2_E = 1.4426950408889634


def plant(sim: Any) -> None:
    """Make `import flash_mla` in this process return a new module with `has_legacy` (always True)
    and the reference of `flash_mla_sparse_fwd`, bound to `sim`, which raises RuntimeError for a
    call beyond the library's limits."""
    given = {each.__name__: partial(each, sim) for each in (flash_mla_sparse_fwd,)}
    plant_module("flash_mla", has_legacy=has_legacy, **given)


def has_legacy() -> bool:
    return True


def flash_mla_sparse_fwd(
    sim: Any,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    _check(q, kv, indices, d_v, attn_sink, topk_length)
    _check_kernels(sim, q, use_legacy, return_log2_lse)
    tokens, heads = q.shape[:2]
    out = torch.empty(tokens, heads, d_v, dtype=q.dtype, device=q.device)
    largest, sums = (torch.empty(tokens, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    given = [x for x in (q, kv, indices, attn_sink, topk_length) if x is not None]

    def kernel() -> None:
        queries, rows, lists = (sim.host_view(x) for x in (q, kv, indices))
        sink = None if attn_sink is None else sim.host_view(attn_sink)
        lens = None if topk_length is None else sim.host_view(topk_length)
        for token in range(tokens):
            chosen = lists[token, 0] if lens is None else lists[token, 0, : int(lens[token])]
            keys = rows[chosen[(chosen >= 0) & (chosen < len(rows))].long(), 0].float()
            found = _attend(queries[token].float(), keys, sm_scale, d_v, sink)
            for view, part in zip((out, largest, sums), found, strict=True):
                sim.host_view(view)[token] = part
        if return_log2_lse:
            sim.host_view(largest).mul_(LOG2_E)
            sim.host_view(sums).mul_(LOG2_E)

    sim.launch(CALL, kernel, reads=given, writes=[out, largest, sums])
    return (out, None, None) if return_log2_lse is False else (out, largest, sums)


def _attend(q: Tensor, keys: Tensor, scale: float, d_v: int, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one token, q [H, D], to keys [N, D]; the values are the first d_v elements of the
    keys. Return, in float32, the result [H, d_v], and for each head the largest scaled score and
    the natural log of the sum of exponentials; without keys 0, -inf and +inf. `sink` [H], a further
    logit without a value, enters the result only."""
    scores = q @ keys.T * scale
    if not len(keys):
        nothing = torch.full((len(q),), torch.inf)
        return torch.zeros(len(q), d_v), -nothing, nothing
    sums = scores.logsumexp(1)
    whole = sums if sink is None else torch.logaddexp(sums, sink)
    return torch.exp(scores - whole.unsqueeze(1)) @ keys[:, :d_v], scores.amax(1), sums


def _check(q: Tensor, kv: Tensor, indices: Tensor, d_v: int, sink: Tensor | None, lens: Tensor | None) -> None:
    """Raise RuntimeError for a call of `flash_mla_sparse_fwd` that breaks a precondition that the
    legacy and the newer kernels share. `sink`, `lens`: its attn_sink and topk_length."""
    tokens, heads, size = q.shape
    others = [x for x in (sink, lens) if x is not None]
    wanted = {
        "everything on one device": together(q, kv, indices, *others),
        "queries and rows in bfloat16": q.dtype == kv.dtype == torch.bfloat16,
        "indices and lengths of int32, sinks of float32": (indices.dtype, *(x.dtype for x in others))
        == (torch.int32, *([torch.float32] if sink is not None else []), *([torch.int32] if lens is not None else [])),
        "heads of 512 or 576 elements, and values of 512": size in (512, 576) and d_v == 512,
        "64 or 128 heads": heads in (64, 128),
        "rows [N, 1, size] and indices [tokens, 1, width]": kv.shape[1:] == (1, size)
        and indices.shape[:2] == (tokens, 1),
        "sinks [heads] and lengths [tokens]": (sink is None or sink.shape == (heads,))
        and (lens is None or lens.shape == (tokens,)),
        f"lists of whole {STEP}s": indices.shape[2] > 0 and indices.shape[2] % STEP == 0,
        "tensors whose last dimension is contiguous": adjacent(q, kv, indices, *others),
        "strides and addresses of whole 16 bytes": all(
            x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
            for x in (q, kv, indices)
        ),
    }
    require(CALL, wanted)


def _check_kernels(sim: Any, q: Tensor, use_legacy: bool, return_log2_lse: bool | None) -> None:
    """Raise RuntimeError if neither the legacy nor the newer kernels serve the call on this chip:
    9.0 needs `use_legacy`, and so do heads of 576 and sums to the base 2."""
    major = sim.kind.properties["major"]
    wanted = {
        "a GPU of compute capability 9.0 or 10": major in (9, 10),
        "use_legacy on GPUs of compute capability 9.0": use_legacy or major != 9,
        "use_legacy for heads of 576": use_legacy or q.shape[2] == 512,
        "use_legacy for sums to the base 2": use_legacy or return_log2_lse is not True,
    }
    require(CALL, wanted)
