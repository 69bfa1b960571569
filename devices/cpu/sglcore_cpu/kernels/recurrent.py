"""Kernel table entries of recurrent layers by the native kernels. Each request has a state in a
pool, which they read and write in place.

Models use them in float32 and bfloat16 (`operands.takes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.kernels.reference_recurrent import L2_EPS
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.kernels.operands import takes
from sglcore_cpu.native import TYPES, Engine


class Recurrent:
    """Implements the kernel table's entries for recurrent layers by methods of the same names, on
    one engine. Each call waits for its result. `slots` int32 [B] names each row's state in the
    pool, `starts` and `lengths` int32 [B] its tokens (None: row r is token r); the new state is
    written to `targets` (None: to `slots`)."""

    def __init__(self, engine: Engine) -> None:
        self._empty = engine.empty
        self._causal_conv, self._gated_delta_rule, self._selective_scan, self._gated_rms_norm = (
            engine.kernel(name).bind()
            for name in ("causal_conv", "gated_delta_rule", "selective_scan", "gated_rms_norm")
        )

    @implements(takes)
    def causal_conv(
        self,
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
        """Implement `KernelTable.causal_conv`: x [T, C], weight [W, C], bias [C] or None -> [T, C];
        `tails` [S, W - 1, C] are updated in place. Threads divide the channels and go through a
        request's tokens in order."""
        tokens, size = x.shape
        out = self._empty(tokens, size, dtype=x.dtype)
        self._causal_conv(
            x=x.data_ptr(),
            x_stride=x.stride()[0],
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            silu=int(silu),
            tails=tails.data_ptr(),
            out=out.data_ptr(),
            size=size,
            taps=weight.shape[0],
            **_rows(slots, starts, lengths, targets, tokens, x.dtype),
        )
        return out

    @implements(takes)
    def gated_delta_rule(
        self,
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
        """Implement `KernelTable.gated_delta_rule`: qkv [T, 2 * Hk * K + H * V] (Hk query and key
        heads of K elements, H value heads of V), a and b [T, H] -> [T, H * V]; `states` float32 [S,
        H, K, V] are updated in place. Threads divide the columns of the states and go through a
        request's tokens in order."""
        tokens, (_, heads, key, size) = qkv.shape[0], states.shape
        out = self._empty(tokens, heads * size, dtype=qkv.dtype)
        self._gated_delta_rule(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride()[0],
            a=a.data_ptr(),
            a_stride=a.stride()[0],
            b=b.data_ptr(),
            b_stride=b.stride()[0],
            a_log=a_log.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            states=states.data_ptr(),
            out=out.data_ptr(),
            key_heads=(qkv.shape[1] - heads * size) // (2 * key),
            heads=heads,
            key=key,
            size=size,
            eps=L2_EPS,
            **_rows(slots, starts, lengths, targets, tokens, qkv.dtype),
        )
        return out

    @implements(takes)
    def selective_scan(
        self,
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
        """Implement `KernelTable.selective_scan`: xbc [T, H * P + 2 * G * N] (H heads of P
        elements, then B and C of G groups with N elements), dt [T, H] -> [T, H * P]; the time step
        is limited to [dt_min, dt_max]. `states` float32 [S, H, P, N] are updated in place. Threads
        divide the rows of the states and go through a request's tokens in order."""
        tokens, (_, heads, size, width) = xbc.shape[0], states.shape
        out = self._empty(tokens, heads * size, dtype=xbc.dtype)
        self._selective_scan(
            xbc=xbc.data_ptr(),
            xbc_stride=xbc.stride()[0],
            dt=dt.data_ptr(),
            dt_stride=dt.stride()[0],
            a_log=a_log.data_ptr(),
            d=d.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            dt_min=dt_min,
            dt_max=dt_max,
            states=states.data_ptr(),
            out=out.data_ptr(),
            groups=(xbc.shape[1] - heads * size) // (2 * width),
            heads=heads,
            size=size,
            width=width,
            **_rows(slots, starts, lengths, targets, tokens, xbc.dtype),
        )
        return out

    @implements(takes)
    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        """Implement `KernelTable.gated_rms_norm`: x and gate [T, N], weight [G, size] -> [T, N].
        Each `size` elements are normalised and multiplied by silu(gate), before the norm if
        `gate_first`, else after it."""
        (rows, width), (groups, size) = x.shape, weight.shape
        out = self._empty(rows, width, dtype=x.dtype)
        self._gated_rms_norm(
            x=x.data_ptr(),
            x_stride=x.stride()[0],
            gate=gate.data_ptr(),
            gate_stride=gate.stride()[0],
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            inner=width // size,
            groups=groups,
            size=size,
            gate_first=int(gate_first),
            type=TYPES[x.dtype],
            eps=eps,
        )
        return out


def _rows(
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None,
    tokens: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    return {
        "slots": slots.data_ptr(),
        "starts": 0 if starts is None else starts.data_ptr(),
        "lengths": 0 if lengths is None else lengths.data_ptr(),
        "targets": (slots if targets is None else targets).data_ptr(),
        "rows": slots.shape[0],
        "tokens": tokens,
        "type": TYPES[dtype],
    }
