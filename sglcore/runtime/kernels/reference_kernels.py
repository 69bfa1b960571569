"""The reference kernels: plain torch, slow and simple.

They define correct results, including the order of casts. The casts are those of the transformers
library, so that bfloat16 log-probabilities can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.runtime.kernels.mxfp4 import dequantized
from sglcore.sampling.gumbel_race import RaceTables
from sglcore.sampling.sampler import SamplingState, draw_greedy, draw_rows


class QuantizedCodes(Protocol):
    """A weight [N, K] as integers.

    w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) with g = k // group.
    """

    @property
    def codes(self) -> Tensor:
        """uint8 [N, K], contiguous, one code per element, each below 2 ** bits."""
        ...

    @property
    def scales(self) -> Tensor:
        """float32 [N, ceil(K / group)]."""
        ...

    @property
    def zeros(self) -> Tensor | None:
        """float32 with the shape of `scales`, not always integers.

        None: all are 2 ** (bits - 1).
        """
        ...

    @property
    def bits(self) -> int:
        """4 or 8."""
        ...

    @property
    def group(self) -> int:
        """Columns that share a scale: 32, 64 or 128."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        ...


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, out], for x [T, in], weight [out, in] and bias [out] or None."""
    return F.linear(x, weight, bias)


def pack_linear(weight: Tensor) -> Tensor:
    """Reference of `KernelTable.pack_linear`: return the weight itself."""
    return weight


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of the weight [vocab, H] at `ids` int [T]: a new tensor [T, H]."""
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply root mean square norm over the last axis of x [..., N] (Zhang and Sennrich 2019); the
    result has the dtype of x.

    Computed in float32, then cast to the dtype of the weight [N] before the product with it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (`rms_norm` of residual + x, that sum), new tensors [T, H]. The sum is rounded to the
    inputs' dtype before the norm.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Apply layer norm to x [T, H], with weight and bias [H] (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return q [T, heads * head_dim] and k [T, kv_heads * head_dim], rotated by rotary embedding
    (Su et al. 2021), as new tensors.

    Row p of `cos_sin_cache` [positions, R] has R / 2 cosines, then R / 2 sines, cast to q's dtype.
    Of each head the first R elements are rotated, i with i + R / 2; the others do not change.
    """
    rows = cos_sin_cache.index_select(0, positions).to(q.dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    return _rotate(q, cos, sin, head_dim), _rotate(k, cos, sin, head_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    tokens, width = x.shape
    half = cos.shape[-1]
    heads = x.view(tokens, width // head_dim, head_dim)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < head_dim:
        parts.append(heads[..., 2 * half :])
    return torch.cat(parts, dim=-1).view(tokens, width)


def silu_and_mul(x: Tensor) -> Tensor:
    """Apply SwiGLU (Shazeer 2020) to x [T, 2 I]: silu of the first I columns, times the others."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Apply GeGLU (Shazeer 2020) with the tanh approximation to x [T, 2 I]: GELU of the first I
    columns, times the others.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    """Apply GELU (Hendrycks and Gimpel 2016) with the exact error function, element by element."""
    return F.gelu(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), element by element (Gemma 2, section 2)."""
    return torch.tanh(x / cap) * cap


def top_k_routing(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.top_k_routing`: a float32 softmax of logits [T, E] over all
    experts, then the `k` largest, largest first; `normalize` divides them by their sum.

    Return weights [T, k] of the logits' dtype, and expert ids int32 [T, k].
    """
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids.to(torch.int32)


def sigmoid(x: Tensor) -> Tensor:
    """Apply the logistic function, element by element."""
    return torch.sigmoid(x)


def sigmoid_routing(
    logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.sigmoid_routing`, with a bias that balances experts (DeepSeek-V3,
    section 2.1.2).

    Takes the best `top_groups` of `groups` groups of neighbouring experts by the sum of their two
    best experts, then the `k` best experts in them. Scores are sigmoid(logits [T, E]); the bias
    float32 [E] affects the choice, not the weights. `normalize` divides the weights by their sum,
    before `scale`. Return weights [T, k] of the logits' dtype, and expert ids int32 [T, k].
    """
    scores, (tokens, experts) = torch.sigmoid(logits.float()), logits.shape
    biased = (scores + bias).view(tokens, groups, experts // groups)
    if top_groups < groups:
        best = biased.topk(2, dim=-1)[0].sum(dim=-1).topk(top_groups, dim=-1)[1]
        left = torch.ones(tokens, groups, dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        biased = biased.masked_fill(left.unsqueeze(-1), -torch.inf)
    ids = biased.view(tokens, experts).topk(k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * scale).to(logits.dtype), ids.to(torch.int32)


def group_limited_routing(logits: Tensor, k: int, groups: int, top_groups: int, scale: float) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.group_limited_routing`, for experts on few devices (DeepSeek-V2,
    section 2.2.2).

    Takes the `top_groups` of `groups` groups of neighbouring experts with the best expert, then the
    `k` best experts in them, by softmax(logits [T, E]). Return those probabilities times `scale`,
    not normalised, [T, k] of the logits' dtype, and expert ids int32 [T, k].
    """
    scores, (tokens, experts) = torch.softmax(logits.float(), dim=-1), logits.shape
    grouped = scores.view(tokens, groups, experts // groups)
    if top_groups < groups:
        best = grouped.amax(dim=-1).topk(top_groups, dim=-1)[1]
        left = torch.ones(tokens, groups, dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        grouped = grouped.masked_fill(left.unsqueeze(-1), -torch.inf)
    weights, ids = grouped.view(tokens, experts).topk(k, dim=-1)
    return (weights * scale).to(logits.dtype), ids.to(torch.int32)


def moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Reference of `KernelTable.moe`: run every expert on every token and mask those not chosen.
    Return [T, H], in hidden's dtype.

    hidden [T, H], weights and ids [T, K] (-1: no expert), w13 [E, 2 I, H], gate rows first, and w2
    [E, H, I]. No shape depends on the routing.
    """

    def run(expert: int) -> Tensor:
        return F.linear(silu_and_mul(F.linear(hidden, w13[expert])), w2[expert])

    return _every_expert(hidden, weights, ids, w13.shape[0], run)


def relu2_moe(hidden: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Reference of `KernelTable.relu2_moe`, computed as `moe`, for experts w1 [E, I, H], squared
    ReLU, w2 [E, H, I], without a gate. Return [T, H].
    """

    def run(expert: int) -> Tensor:
        return F.linear(relu2(F.linear(hidden, w1[expert])), w2[expert])

    return _every_expert(hidden, weights, ids, w1.shape[0], run)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2, element by element (So et al. 2021, Primer)."""
    return torch.relu(x).square()


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) (gpt-oss), [..., I], with gate at most `limit`
    and up within +-`limit`.

    Gate and up are interleaved: columns 2 i and 2 i + 1 of x [..., 2 I].
    """
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def clamped_moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    b13: Tensor,
    w2: Tensor,
    b2: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Reference of `KernelTable.clamped_moe`, computed as `moe`: every expert on every token.

    Experts have biases b13 [E, 2 I] and b2 [E, H] and the activation `clamped_swiglu`, for which
    gate and up rows of w13 are interleaved.
    """

    def run(expert: int) -> Tensor:
        return _clamped(hidden, w13[expert], b13[expert], w2[expert], b2[expert], alpha, limit)

    return _every_expert(hidden, weights, ids, w13.shape[0], run)


def limited_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """Return silu(gate) * up, [T, I], gate at most `limit` and up within +-`limit` (DeepSeek-V4).
    Gate is the first half of the columns of x [T, 2 I].
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def limited_moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """Reference of `KernelTable.limited_moe`, computed as `moe`: every expert on every token, with
    the activation `limited_silu_and_mul`. Return [T, H]; w13 [E, 2 I, H], w2 [E, H, I].
    """

    def run(expert: int) -> Tensor:
        return F.linear(limited_silu_and_mul(F.linear(hidden, w13[expert]), limit), w2[expert])

    return _every_expert(hidden, weights, ids, w13.shape[0], run)


def sqrtsoftplus_routing(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.sqrtsoftplus_routing`: the `k` experts with the largest
    sqrt(softplus(logits [T, E])) + bias, float32 [E].

    Return weights [T, k] of the logits' dtype, which are the scores without the bias, divided by
    their sum, times `scale`; and expert ids int32 [T, k].
    """
    scores = torch.sqrt(F.softplus(logits.float()))
    return _weighed(scores, torch.topk(scores + bias, k, dim=-1)[1], scale, logits.dtype)


def hash_routing(logits: Tensor, input_ids: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.hash_routing`: the experts of token t are table[input_ids[t]], of
    `table` int32 [vocab, K] (Roller et al. 2021, Hash Layers).

    Return weights [T, K] as `sqrtsoftplus_routing` computes them, and expert ids int32 [T, K].
    """
    scores = torch.sqrt(F.softplus(logits.float()))
    return _weighed(scores, table.index_select(0, input_ids).long(), scale, logits.dtype)


def _weighed(scores: Tensor, ids: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights = scores.gather(1, ids)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale).to(dtype), ids.to(torch.int32)


def mxfp4_moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    s13: Tensor,
    b13: Tensor,
    w2: Tensor,
    s2: Tensor,
    b2: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Reference of `KernelTable.mxfp4_moe`: dequantise one expert at a time and compute as
    `clamped_moe`. w13 and w2 are codes uint8 [E, rows, columns / 32, 16], s13 and s2 their scales
    uint8 [E, rows, columns / 32].
    """

    def run(expert: int) -> Tensor:
        first = dequantized(w13[expert], s13[expert]).to(hidden.dtype)
        second = dequantized(w2[expert], s2[expert]).to(hidden.dtype)
        return _clamped(hidden, first, b13[expert], second, b2[expert], alpha, limit)

    return _every_expert(hidden, weights, ids, w13.shape[0], run)


def _clamped(hidden: Tensor, w13: Tensor, b13: Tensor, w2: Tensor, b2: Tensor, alpha: float, limit: float) -> Tensor:
    """Return the output [T, H] of one expert of `clamped_moe`, with its own weights and biases, for
    every token of hidden [T, H]; not weighted.
    """
    return F.linear(clamped_swiglu(F.linear(hidden, w13, b13), alpha, limit), w2, b2)


def _every_expert(hidden: Tensor, weights: Tensor, ids: Tensor, experts: int, run: Callable[[int], Tensor]) -> Tensor:
    total = torch.zeros_like(hidden)
    for expert in range(experts):
        chosen = ids == expert
        weight = weights.masked_fill(~chosen, 0).sum(dim=-1, keepdim=True)
        total = total + (run(expert) * weight).masked_fill(~chosen.any(dim=-1, keepdim=True), 0)
    return total


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """Reference of `KernelTable.store_kv`: write row t of key and value [T, kv_heads, D] to KV slot
    out_cache_loc[t] of both caches [cells, kv_heads, D], cast to their dtype.
    """
    k_cache[out_cache_loc] = key.to(k_cache.dtype)
    v_cache[out_cache_loc] = value.to(v_cache.dtype)


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
) -> Tensor:
    """Reference of `KernelTable.rotary_and_store`: call `rotary`, then `store_kv` with the rotated
    k and with v [T, kv_heads * head_dim]. Return the rotated q.

    Not in the default table: it would replace a device's own two kernels.
    """
    q, k = rotary(q, k, positions, cos_sin_cache, head_dim)
    shape = (k.shape[0], *k_cache.shape[1:])
    store_kv(k.view(shape), v.view(shape), k_cache, v_cache, out_cache_loc)
    return q


def norm_rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
) -> Tensor:
    """Reference of `KernelTable.norm_rotary_and_store`: call `rms_norm` for each head of q and k
    with weights [head_dim], then `rotary_and_store`, which stores the normed and rotated k, and v.
    Return the normed and rotated q.
    """
    q, k = (
        rms_norm(x.unflatten(1, (x.shape[1] // head_dim, head_dim)), weight, eps).flatten(1)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return rotary_and_store(q, k, v, positions, cos_sin_cache, head_dim, k_cache, v_cache, out_cache_loc)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Reference of `KernelTable.gated_linear`: call `linear` with weight [2 I, in], gate rows
    first, without bias, then `silu_and_mul`; return [T, I].
    """
    return silu_and_mul(linear(x, weight, None))


def cache_locations(
    page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int, out_cache_loc: Tensor
) -> None:
    """Reference of `KernelTable.cache_locations`: write the KV slot of each of T tokens to
    `out_cache_loc` int [T], by request slot and position int32 [T] and by the pages of the slots in
    `page_table` int32 [S, P]: page * page_size + position % page_size.
    """
    pages = (positions // page_size).add_(slots, alpha=page_table.shape[1])
    torch.remainder(positions, page_size, out=out_cache_loc)
    out_cache_loc.add_(page_table.view(-1).index_select(0, pages), alpha=page_size)


def draw(logits: Tensor, state: SamplingState, tables: RaceTables) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.draw`: call the sampler's own function, in torch. Return the tokens
    int32 [B] drawn from logits [B, V], and bool [B]: rows with NaN, +inf or only -inf (token 0).
    """
    return draw_rows(logits, state, tables)


def pack_quantized(quantized: QuantizedCodes) -> Tensor:
    """Reference of `KernelTable.pack_quantized`: dequantise to a plain weight [N, K] of
    `quantized.dtype`, a new tensor.
    """
    columns = quantized.codes.shape[1]
    scales, zeros = (
        part if part is None else part.repeat_interleave(quantized.group, 1)[:, :columns]
        for part in (quantized.scales, quantized.zeros)
    )
    assert scales is not None
    middle = 1 << (quantized.bits - 1)
    return ((quantized.codes.float() - (middle if zeros is None else zeros)) * scales).to(quantized.dtype)


def quantize_linear(weight: Tensor, kind: str) -> Tensor:
    """Reference of `KernelTable.quantize_linear`: round each group of 32 columns of a row to equal
    steps and return a plain weight of the same shape and dtype.

    A step is 1/127 of the group's largest magnitude (`kind` "int8"), or 1/15 of its range ("int4").
    """
    columns = weight.shape[1]
    padded = F.pad(weight.float(), (0, -columns % 32)).unflatten(1, (-(-columns // 32), 32))
    low, high = padded.amin(-1, keepdim=True), padded.amax(-1, keepdim=True)
    if kind == "int8":
        low, high = torch.zeros_like(low), torch.maximum(-low, high)
    step = ((high - low) / (127 if kind == "int8" else 15)).clamp(min=torch.finfo(torch.float32).tiny)
    return (((padded - low) / step).round() * step + low).flatten(1)[:, :columns].to(weight.dtype)


def pack_head(weight: Tensor) -> Tensor:
    """Reference of `KernelTable.pack_head`: return the weight itself."""
    return weight


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Reference of `KernelTable.head`: `linear` of hidden [N, H] and weight [vocab, H], without a
    bias, cast to float32 [N, vocab] afterwards.
    """
    return linear(hidden, weight, None).float()


def pack_parts(parts: Sequence[Tensor], done: Callable[[int], None]) -> Tensor | None:
    """Reference of `KernelTable.pack_parts`: concatenate the parts [rows, in] by rows, call `done`
    with the index of each part, and return the `pack_linear` of the whole. Never returns None.
    """
    joined = torch.cat(list(parts))
    for place in range(len(parts)):
        done(place)
    return pack_linear(joined)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `KernelTable.greedy`: call the sampler's own function, in torch. Return the
    first largest logit of each row as a token int32 [B], and the bad rows bool [B] as in `draw`.
    """
    return draw_greedy(logits)
