"""The reference kernels of recurrent layers: plain torch, token by token.

They define correct results. Row r keeps its state in `slots[r]` of a pool. Its tokens are
[starts[r], starts[r] + lengths[r]); without `starts` and `lengths` it is token r alone. Rows of
slot 0 are padding: they change no state, and their tokens, like tokens of no row, give zeros. The
new state of row r is written to `targets[r]` of the pool, nowhere if that is 0; without `targets`,
to `slots[r]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
"""The epsilon of the norm of queries and keys."""

Step = Callable[..., Tensor]
"""Computes one token of each of several rows.

Takes inputs [N, ...] and slots int64 [N], returns results [N, ...].
"""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    tails: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
) -> Tensor:
    """Reference of `KernelTable.causal_conv`: convolve each channel of x [T, C] over a token and
    the W - 1 before it, with weight [W, C] and bias [C], then silu if `silu` (Gu and Dao 2023,
    Mamba). Return [T, C].

    `tails` [S, W - 1, C] has the last inputs of each slot and is updated in place. Row r continues
    slot slots[r], has the tokens [starts[r], starts[r] + lengths[r]) (both None: token r) and
    leaves its new tail at targets[r] (None: at slots[r]); slot 0 is padding.
    """
    if targets is not None:
        own, places = _apart(tails, slots)
        out = causal_conv(x, weight, bias, silu, own, places, starts, lengths)
        _keep(tails, (targets * (slots > 0)).long(), own[1:])
        return out

    def step(x: Tensor, slots: Tensor) -> Tensor:
        window = torch.cat((tails.index_select(0, slots), x.unsqueeze(1)), dim=1)
        _keep(tails, slots, window[:, 1:])
        out = (window.float() * weight.float()).sum(1)
        out = (out if bias is None else out + bias.float()).to(x.dtype)
        return F.silu(out) if silu else out

    return _in_order(step, slots, starts, lengths, x)


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
) -> Tensor:
    """Reference of `KernelTable.gated_delta_rule`: S = exp(g) S; S = S + k (beta (v - S^T k))^T;
    S^T q / sqrt(K), with q and k of length 1 (Yang et al. 2024, Gated Delta Networks).

    qkv [T, 2 Hk K + H V] has queries and keys of Hk heads, then values of H heads; a and b [T, H],
    a_log and dt_bias float32 [H]. `states` float32 [slots, H, K, V] are updated in place. Return
    [T, H V]. `slots`, `starts`, `lengths` and `targets` are those of `causal_conv`.
    """
    if targets is not None:
        own, places = _apart(states, slots)
        out = gated_delta_rule(qkv, a, b, a_log, dt_bias, own, places, starts, lengths)
        _keep(states, (targets * (slots > 0)).long(), own[1:])
        return out
    _, heads, key_size, size = states.shape
    key_heads = (qkv.shape[1] - heads * size) // (2 * key_size)

    def step(qkv: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
        tokens = qkv.shape[0]
        parts = qkv.float().split([key_heads * key_size, key_heads * key_size, heads * size], dim=1)
        q, k = (_unit(part.view(tokens, key_heads, key_size), heads) for part in parts[:2])
        v, beta = parts[2].view(tokens, heads, size), b.sigmoid().float().unsqueeze(-1)
        decay = (-a_log.exp() * F.softplus(a.float() + dt_bias)).exp()
        state = states.index_select(0, slots) * decay[..., None, None]
        delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta
        state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
        _keep(states, slots, state)
        return (state * (q * key_size**-0.5).unsqueeze(-1)).sum(-2).to(qkv.dtype).view(tokens, heads * size)

    return _in_order(step, slots, starts, lengths, qkv, a, b)


def _unit(x: Tensor, heads: int) -> Tensor:
    """Normalise every head of float32 [N, key_heads, K] to length 1 and repeat each heads /
    key_heads times, next to each other: [N, heads, K].
    """
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def selective_scan(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    states: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
) -> Tensor:
    """Reference of `KernelTable.selective_scan`: S = exp(dt A) S + dt x B^T; S C + D x, with A =
    -exp(a_log) and dt = softplus(dt + dt_bias) within [dt_min, dt_max] (Dao and Gu 2024, Mamba 2).

    xbc [T, H P + 2 G N] has x of H heads, then B and C of G groups; dt [T, H], a_log, d and dt_bias
    float32 [H]. `states` float32 [slots, H, P, N] are updated in place. Return [T, H P]. `slots`,
    `starts`, `lengths` and `targets` are those of `causal_conv`.
    """
    if targets is not None:
        own, places = _apart(states, slots)
        out = selective_scan(xbc, dt, a_log, d, dt_bias, dt_min, dt_max, own, places, starts, lengths)
        _keep(states, (targets * (slots > 0)).long(), own[1:])
        return out
    _, heads, size, width = states.shape
    groups = (xbc.shape[1] - heads * size) // (2 * width)

    def step(xbc: Tensor, dt: Tensor, slots: Tensor) -> Tensor:
        tokens = xbc.shape[0]
        parts = xbc.float().split([heads * size, groups * width, groups * width], dim=1)
        x = parts[0].view(tokens, heads, size)
        before, after = (part.view(tokens, groups, width).repeat_interleave(heads // groups, 1) for part in parts[1:])
        wide = F.softplus(dt.float() + dt_bias).clamp(dt_min, dt_max).unsqueeze(-1)
        decay = (wide.squeeze(-1) * -a_log.exp()).exp()
        state = states.index_select(0, slots) * decay[..., None, None]
        state = state + (wide * x).unsqueeze(-1) * before.unsqueeze(-2)
        _keep(states, slots, state)
        out = (state * after.unsqueeze(-2)).sum(-1) + d.unsqueeze(-1) * x
        return out.to(xbc.dtype).view(tokens, heads * size)

    return _in_order(step, slots, starts, lengths, xbc, dt)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """Reference of `KernelTable.gated_rms_norm`: root mean square norm of each `size` elements of x
    [T, N], times silu(gate [T, N]); return [T, N] of x's dtype.

    The product comes before the norm if `gate_first` (Mamba 2), otherwise after it (Gated Delta
    Networks). The G rows of weight [G, size] belong to the groups of `size` elements in turn.
    """
    tokens, width = x.shape
    groups, size = weight.shape
    opened = F.silu(gate.float())
    wide = (x.float() * opened if gate_first else x.float()).view(tokens, width // size, size)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    out = (weight * normed.view(tokens, width // (groups * size), groups, size)).view(tokens, width)
    return out if gate_first else (out * opened).to(x.dtype)


def _apart(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pool of copies, the state of slot 0 and then that of each row, and the slots of the
    rows in it (0 for padding).
    """
    places = torch.arange(1, slots.shape[0] + 1, dtype=slots.dtype, device=slots.device)
    return torch.cat((pool[:1], pool.index_select(0, slots))), places * (slots > 0)


def _keep(pool: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write `new` [N, ...] to the pool at slots [N], except at slot 0."""
    is_padding = (slots == 0).view(-1, *(1 for _ in new.shape[1:]))
    pool.index_copy_(0, slots, torch.where(is_padding, pool.index_select(0, slots), new.to(pool.dtype)))


def _in_order(step: Step, slots: Tensor, starts: Tensor | None, lengths: Tensor | None, *inputs: Tensor) -> Tensor:
    """Apply `step` to every token, each after the earlier tokens of its row, and return the results
    [T, ...].

    `inputs` are [T, ...]. Tokens of no row or of slot 0 give zeros.
    """
    if starts is None or lengths is None:
        return _of_rows(step(*inputs, slots.long()), slots)
    tokens = inputs[0].shape[0]
    place = torch.arange(tokens, device=slots.device).unsqueeze(1)
    mine = ((place >= starts) & (place < starts + lengths)) * slots
    slot_of = mine.sum(1)
    if not tokens:
        return step(*inputs, slot_of)
    each = [step(*(part[i : i + 1] for part in inputs), slot_of[i : i + 1]) for i in range(tokens)]
    return _of_rows(torch.cat(each), slot_of)


def _of_rows(results: Tensor, slots: Tensor) -> Tensor:
    return results.masked_fill((slots == 0).unsqueeze(1), 0)
