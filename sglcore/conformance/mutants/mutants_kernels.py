"""Broken kernels: one for each entry of the table, and the usual mistakes of kernels. Most are
functions from an entry's function to a broken one; the docstring is the text of the `Mutant`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.conformance.mutant import Mutant, words_of
from sglcore.runtime.kernels.reference_kernels import linear, rms_norm
from sglcore.runtime.kernels.table import KernelTable, Limited

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def last_row_is_first(real: Callable[..., Any]) -> Callable[..., Any]:
    """The last row of a result is a copy of the first."""

    def broken(*args: Any) -> Any:
        result = real(*args)
        parts = result if isinstance(result, tuple) else (result,)
        wrong = tuple(torch.cat([part[:-1], part[:1]]) if part.shape[0] > 1 else part for part in parts)
        return wrong if isinstance(result, tuple) else wrong[0]

    return broken


def scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    """A packed weight is a little too large."""
    return lambda weight, *how: real(weight * 1.1, *how)


def swapped(real: Callable[..., Any]) -> Callable[..., Any]:
    """The rows of the last part are reversed."""
    return lambda parts, done: real([*parts[:-1], parts[-1].flip(0)], done)


def forgets_zeros(real: Callable[..., Any]) -> Callable[..., Any]:
    """Every zero point is taken to be the middle value."""
    return lambda quantized: real(replace(quantized, zeros=None))


def one_cell_more(real: Callable[..., Any]) -> Callable[..., Any]:
    """The KV slot after each one is written too."""

    def broken(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, cells: Tensor) -> None:
        real(key, value, k_cache, v_cache, cells + 1)
        real(key, value, k_cache, v_cache, cells)

    return broken


def next_cell(real: Callable[..., Any]) -> Callable[..., Any]:
    """Every value of the output is one too high."""

    def broken(*args: Any) -> None:
        real(*args)
        args[-1].add_(1)

    return broken


def one_row_more(real: Callable[..., Any]) -> Callable[..., Any]:
    """The row after each is written too."""

    def broken(*args: Any) -> None:
        real(*args[:-2], args[-2] + 1, args[-1])
        real(*args)

    return broken


def keeps_order(real: Callable[..., Any]) -> Callable[..., Any]:
    """The order of least recent use is not updated."""

    def broken(*args: Any) -> None:
        before = args[5].clone()
        real(*args)
        args[5].copy_(before)

    return broken


def loses_last_copy(real: Callable[..., Any]) -> Callable[..., Any]:
    """The last row of each request is not copied."""
    return lambda source, target, loads, counts: real(source, target, loads, (counts - 1).clamp(min=0))


def reads_what_it_wrote(real: Callable[..., Any]) -> Callable[..., Any]:
    """The state is updated before its rows are read."""

    def broken(kv_gate: Tensor, state: Tensor, *args: Any) -> Tensor:
        state[args[-1]] = kv_gate.to(state.dtype)
        return real(kv_gate, state, *args)

    return broken


def reads_nobodys_row(real: Callable[..., Any]) -> Callable[..., Any]:
    """Unused entries of a list are taken for row 0."""
    return lambda q, rows, chosen, *args: real(q, rows, chosen.clamp(min=0), *args)


def stores_plain_keys(real: Callable[..., Any]) -> Callable[..., Any]:
    """Keys are stored as they were before the rotation."""

    def broken(*args: Any) -> Tensor:
        q = real(*args)
        k, k_cache, cells = args[1], args[6], args[8]
        k_cache.index_copy_(0, cells.long(), k.reshape(-1, *k_cache.shape[1:]).to(k_cache.dtype))
        return q

    return broken


def ignores_strides(real: Callable[..., Any]) -> Callable[..., Any]:
    """Strided rows are read as if they were contiguous."""

    def broken(x: Tensor, *args: Any) -> Any:
        width = x.shape[-1]
        return real(x.as_strided(x.shape, (width, 1)) if x.dim() == 2 else x, *args)

    return broken


def refuses_zero_rows(real: Callable[..., Any]) -> Callable[..., Any]:
    """A launch over nothing is an error."""

    def broken(x: Tensor, *args: Any) -> Any:
        if not x.shape[0]:
            raise RuntimeError("invalid configuration: a grid of zero blocks")
        return real(x, *args)

    return broken


def writes_input(real: Callable[..., Any]) -> Callable[..., Any]:
    """The result is also written over an input that must not change."""

    def broken(x: Tensor, *args: Any) -> Any:
        result = real(x, *args)
        x[..., : result.shape[-1]].copy_(result)
        return result

    return broken


def writes_past_end(real: Callable[..., Any]) -> Callable[..., Any]:
    """The element after the last is written, as by a block without its mask."""

    def broken(x: Tensor, *args: Any) -> Any:
        if x.numel():
            last = x.storage_offset() + sum(
                (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)
            )
            x.as_strided((1,), (1,), last + 1).fill_(0)
        return real(x, *args)

    return broken


def keeps_wide_products(real: Callable[..., Any]) -> Limited:
    """The result silently has the dtype of the product with the weight."""

    def broken(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return real(x, weight, eps).to(weight.dtype)

    return Limited(broken)


def sums_every_expert(real: Callable[..., Any]) -> Callable[..., Any]:
    """Ids that name no expert are taken for expert 0."""

    def broken(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return real(hidden, weights, ids.clamp(min=0), w13, w2)

    return broken


def loses_tail(real: Callable[..., Any]) -> Callable[..., Any]:
    """Every step begins with an empty state."""

    def broken(*args: Any) -> Tensor:
        args[4].zero_()
        return real(*args)

    return broken


def keeps_padding(real: Callable[..., Any]) -> Callable[..., Any]:
    """Rows of slot 0 write their state too."""

    def broken(*args: Any) -> Tensor:
        args[-5][0] += 1
        return real(*args)

    return broken


def decays_afterwards(real: Callable[..., Any]) -> Callable[..., Any]:
    """The state is read and written before it decays."""

    def broken(*args: Any) -> Tensor:
        _, a, _, a_log, dt_bias, states, slots, starts, *_ = args
        result = real(*args[:3], torch.full_like(a_log, float("-inf")), *args[4:])
        if starts is None:
            decay = (-a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)).exp()
            states[slots] *= decay[..., None, None]
        return result

    return broken


def writes_in_place(real: Callable[..., Any]) -> Callable[..., Any]:
    """States are written to their old slots instead of their target slots."""
    return lambda *args: real(*args[:-1], None)


def whole_blocks(real: Callable[..., Any]) -> Limited:
    """Silently skips the last elements of a row that do not fill a block of 32."""

    def broken(x: Tensor) -> Tensor:
        result = real(x)
        result[:, result.shape[1] // 32 * 32 :] = 0
        return result

    return Limited(broken)


def hands_on(real: Callable[..., Any]) -> Limited:
    """Heads go to the reference, although it declares that it takes them."""

    def broken(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps) if x.dim() == 3 else real(x, weight, eps)

    return Limited(broken)


def takes_nothing(real: Callable[..., Any]) -> Limited:
    """Every size is refused."""
    return Limited(real, lambda *call: "not in this size")


def takes_even_rows(real: Callable[..., Any]) -> Limited:
    """The sizes that it takes depend on the number of rows."""
    return Limited(lambda x: real(x), lambda x: "an odd number of rows" if x.shape[0] % 2 else "")


def packs_what_linear_refuses(table: KernelTable) -> KernelTable:
    """Every weight is packed, with reversed rows, for a product that takes only whole blocks of 16
    rows."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight.flip(0), bias)

    def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        return f"{weight.shape[0]} rows; it takes blocks of 16" if weight.shape[0] % 16 else ""

    return table.replace(linear=linear).replace(
        linear=Limited(product, takes), pack_linear=lambda weight: weight.flip(0)
    )


def _mutant(entry: str, how: Callable[[Callable[..., Any]], Callable[..., Any] | Limited]) -> Mutant:
    """Return a mutant of the entry of this name: `how` returns the broken function for the real
    one, or for the reference's where the table has none. The broken function refuses the same
    arguments as the real one, unless it is a `Limited`, which says itself what it takes."""

    def change(table: KernelTable) -> KernelTable:
        real, held = getattr(table, entry), table.candidates[entry]
        broken = how(getattr(table.complete(), entry) if real is None else real)
        if not isinstance(broken, Limited) and held:
            broken = Limited(broken, held[0].takes)
        return table.replace(**{entry: broken})

    words, says = words_of(how)
    return Mutant(name=f"{entry}: {words}", says=says, steps=MappingProxyType({"kernels": change}), case=entry)


_OWN: MappingProxyType[str, Change] = MappingProxyType(
    {
        "pack_linear": scaled,
        "pack_parts": swapped,
        "pack_head": scaled,
        "quantize_linear": scaled,
        "pack_quantized": forgets_zeros,
        "store_kv": one_cell_more,
        "cache_locations": next_cell,
        "norm_rope_store": one_row_more,
        "index_key_store": one_row_more,
        "window_rows": next_cell,
        "block_rows": next_cell,
        "compress_plan": next_cell,
        "place_proposals": next_cell,
        "accept_proposals": next_cell,
        "tree_walk": next_cell,
        "tree_expand": next_cell,
        "tree_build": next_cell,
        "tree_place": next_cell,
        "swap_in": next_cell,
        "copy_rows": loses_last_copy,
    }
)
MUTANTS: tuple[Mutant, ...] = (
    *(_mutant(entry, _OWN.get(entry, last_row_is_first)) for entry in KernelTable.declared()),
    _mutant("rotary_and_store", stores_plain_keys),
    _mutant("norm_rotary_and_store", stores_plain_keys),
    _mutant("rms_norm", ignores_strides),
    _mutant("silu_and_mul", refuses_zero_rows),
    _mutant("gelu", writes_input),
    _mutant("gelu", writes_past_end),
    _mutant("moe", sums_every_expert),
    _mutant("causal_conv", loses_tail),
    *(_mutant(entry, keeps_padding) for entry in ("causal_conv", "gated_delta_rule", "selective_scan")),
    *(_mutant(entry, writes_in_place) for entry in ("causal_conv", "gated_delta_rule", "selective_scan")),
    _mutant("gated_delta_rule", decays_afterwards),
    _mutant("compress", reads_what_it_wrote),
    _mutant("swap_in", keeps_order),
    _mutant("sparse_mqa", reads_nobodys_row),
    _mutant("silu_and_mul", whole_blocks),
    _mutant("rms_norm", hands_on),
    _mutant("rms_norm", keeps_wide_products),
    _mutant("gelu", takes_nothing),
    _mutant("gelu", takes_even_rows),
    Mutant(
        name="pack_linear: packs what linear refuses",
        says=(packs_what_linear_refuses.__doc__ or "").strip(),
        steps=MappingProxyType({"kernels": packs_what_linear_refuses}),
        case="pack_linear",
    ),
)
