"""The kernel table: every numerical operation a model may use, one function each.

`reference.py` defines what each entry means. A device replaces entries with `KernelTable.replace`; `origin` remembers
which implementation each entry is, for the ledger.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.sampling.sampler import Draw, Greedy, draw_rows

Kernel: TypeAlias = Callable[..., object]

_DOES_THE_WORK_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rotary_and_store": ("rotary", "store_kv"),
        "norm_rotary_and_store": ("rms_norm", "rotary", "store_kv", "rotary_and_store"),
        "gated_linear": ("linear", "silu_and_mul"),
        "pack_quantized": ("linear",),
        "quantize_linear": ("linear",),
        "pack_parts": ("linear", "pack_linear"),
        "pack_head": ("linear", "embedding"),
        "head": ("linear",),
        "greedy": ("draw",),
    }
)
"""Optional entries, and the entries without which they are not what they were."""

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def origin_of(kernel: Kernel) -> str:
    """`module:name` of a kernel, as the ledger shows it; of its type, if the kernel is an object without a name."""
    function = kernel.func if isinstance(kernel, functools.partial) else kernel
    named = function if isinstance(function, _FUNCTIONS) else type(function)
    return f"{named.__module__}:{named.__qualname__}"


class QuantizedCodes(Protocol):
    """A weight [N, K] as integers: w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) with g = k // group."""

    @property
    def codes(self) -> Tensor:
        """uint8 [N, K], contiguous, one code an element, each below 2 ** bits."""
        ...

    @property
    def scales(self) -> Tensor:
        """float32 [N, ceil(K / group)]."""
        ...

    @property
    def zeros(self) -> Tensor | None:
        """float32 as `scales`, not always whole numbers; None where every one is 2 ** (bits - 1)."""
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
        """What the model is computed in."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """One function for each operation. T tokens, H hidden size, D head size, I intermediate size, E experts, K of them a token.

    No entry reads a device value on the host, and every entry accepts T = 0. Results are new tensors unless the entry
    says otherwise. Inputs may be row-strided views whose last dimension is contiguous. Unless noted, results have the
    dtype of the first argument, and sums are accumulated in float32 or wider.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """`linear(x [T, in], weight [out, in], bias [out] | None) -> [T, out]`; takes plain and packed weights."""
    pack_linear: Callable[[Tensor], Tensor]
    """`pack_linear(weight [out, in]) -> weight`: the form that `linear` reads fastest, made once after loading.

    The result has the same shape; the plain weight is dropped. May return its argument.
    """
    embedding: Callable[[Tensor, Tensor], Tensor]
    """`embedding(ids int [T], weight [vocab, H]) -> [T, H]`; every id is below vocab."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """`rms_norm(x [..., N], weight [N], eps) -> [..., N]`: x / sqrt(mean(x^2) + eps) in float32, cast, times weight."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """`add_rms_norm(x [T, H], residual [T, H], weight [H], eps) -> (normed, residual)`: residual + x, and its norm.

    May write its results into `x` and `residual`; the caller uses neither afterwards.
    """
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """`layer_norm(x [T, H], weight [H], bias [H], eps) -> [T, H]`."""
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """`rotary(q [T, heads * D], k [T, kv_heads * D], positions int [T], cos_sin_cache float32 [P, R], D) -> (q, k)`.

    Rotates the first R <= D elements of each head in pairs (i, i + R / 2); the others pass. Row p of the cache is
    R / 2 cosines, then R / 2 sines, of position p; they are cast to q's dtype before use. Every position is below P.
    """
    silu_and_mul: Callable[[Tensor], Tensor]
    """`silu_and_mul(x [T, 2 * I]) -> [T, I]`: silu(x[:, :I]) * x[:, I:], silu cast to x's dtype before the product."""
    gelu: Callable[[Tensor], Tensor]
    """`gelu(x [T, I]) -> [T, I]`: x * Phi(x), with the exact error function."""
    top_k_routing: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    """`top_k_routing(logits [T, E], K, normalize) -> (weights [T, K] of logits' dtype, ids int64 [T, K])`.

    The K largest of softmax(logits) in float32, largest first; `normalize` divides them by their sum.
    """
    moe: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """`moe(hidden [T, H], weights [T, K], ids int [T, K], w13 [E, 2 * I, H], w2 [E, H, I]) -> [T, H]`.

    Sum over k of weights[t, k] * w2[e] @ silu_and_mul(w13[e] @ hidden[t]) with e = ids[t, k], added by ascending expert
    in hidden's dtype. An id of -1 means no expert and adds nothing, whatever its weight and its row contain.
    """
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """`store_kv(key, value [T, kv_heads, D], k_cache, v_cache [cells, kv_heads, D], out_cache_loc int [T])`.

    Writes row t into cell out_cache_loc[t] of both caches, cast to their dtype. Cells are distinct, except that any
    number of padding rows may name cell 0, whose content is never read.
    """
    cache_locations: Callable[[Tensor, Tensor, Tensor, int, Tensor], None]
    """`cache_locations(page_table int32 [slots, P], slots int32 [T], positions int32 [T], page_size, out int [T])`.

    Writes page_table[slots, positions // page_size] * page_size + positions % page_size into `out`.
    """
    draw: Draw = draw_rows
    """`draw(logits float [B, V], state, tables) -> (tokens int32 [B], bad bool [B])`: the sampler's draw, to the bit.

    `tables` are those of the vocabulary. Logits are not changed. A bad row holds NaN, +inf or nothing but -inf; its
    token is 0. A greedy row's token is its first largest logit. Older packages do not give it.
    """
    greedy: Greedy | None = None
    """`greedy(logits float [B, V]) -> (tokens int32 [B], bad bool [B])`: `draw` where every row is greedy. None: torch's."""
    rotary_and_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor, Tensor], Tensor] | None = (
        None
    )
    """`rotary_and_store(q, k, v [T, kv_heads * D], positions, cos_sin_cache, D, k_cache, v_cache, out_cache_loc) -> q`.

    `rotary` of q and k, then `store_kv` of that k and of v, in one pass. None: a layer calls the two.
    """
    norm_rotary_and_store: Callable[..., Tensor] | None = None
    """`norm_rotary_and_store(q, k, v, positions, cos_sin_cache, D, k_cache, v_cache, out_cache_loc, q_weight [D],
    k_weight [D], eps) -> q`.

    `rms_norm` of each head of q and of k, then `rotary_and_store`, in one pass. None: a layer calls the parts.
    """
    gated_linear: Callable[[Tensor, Tensor], Tensor] | None = None
    """`gated_linear(x [T, in], weight [2 * I, in]) -> [T, I]`: `silu_and_mul(linear(x, weight, None))` in one pass.

    Takes plain and packed weights. None: a layer calls the two.
    """
    pack_quantized: Callable[[QuantizedCodes], Tensor] | None = None
    """`pack_quantized(codes) -> weight`: a quantised checkpoint's weight in a form that `linear` reads, its codes as they are.

    The result has the shape [N, K] of the codes, which are dropped, and their `dtype`. None: such weights are dequantised
    as they are loaded.
    """
    quantize_linear: Callable[[Tensor, str], Tensor] | None = None
    """`quantize_linear(weight [out, in], "int8" or "int4") -> weight`: rounded to that many bits, in a form that `linear`
    reads. The result has the same shape; the plain weight is dropped. None: this device does not quantise.
    """
    pack_parts: Callable[[Sequence[Tensor], Callable[[int], None]], Tensor | None] | None = None
    """`pack_parts(parts, each [rows, in], done) -> weight`: `pack_linear` of the parts one below the other, read where they
    lie: in a mapped file, at any address. `done(place)` when a part is read. None as the result where they do not fit this
    form; then nothing was read.

    None as the entry: parts are copied side by side first.
    """
    pack_head: Callable[[Tensor], Tensor] | None = None
    """`pack_head(weight [vocab, H]) -> weight`: `pack_linear` for the output layer, whose weight may be the embedding's.

    Giving it promises that `embedding` reads, beside plain weights, what this entry, `pack_quantized` and
    `quantize_linear` make. None: a weight that is both stays plain, and any other output layer is a linear layer.
    """
    head: Callable[[Tensor, Tensor], Tensor] | None = None
    """`head(hidden [N, H], weight [vocab, H]) -> float32 [N, vocab]`: the values of `linear(hidden, weight, None).float()`,
    in one pass. Takes plain and packed weights. None: the model calls the two.
    """
    origin: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Which implementation each entry that is there is, as `module:name`; filled in, not given."""

    def __post_init__(self) -> None:
        entries = {name: getattr(self, name) for name in entry_names()}
        origin = {name: origin_of(entry) for name, entry in entries.items() if entry is not None}
        object.__setattr__(self, "origin", MappingProxyType(origin))

    def replace(self, **entries: Kernel) -> KernelTable:
        """A new table with some entries replaced; raises `ConfigError` for a name that is not an entry.

        An optional entry that rests on a replaced one goes, unless it is replaced too.
        """
        unknown = sorted(entries.keys() - set(entry_names()))
        if unknown:
            raise ConfigError(
                f"the kernel table has no entry {', '.join(unknown)}", wanted=f"one of {', '.join(entry_names())}"
            )
        for entry, parts in _DOES_THE_WORK_OF.items():
            if not entries.keys().isdisjoint(parts):
                entries.setdefault(entry, None)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(self, **entries)  # pyright: ignore[reportArgumentType]


def entry_names() -> tuple[str, ...]:
    """The names of all entries, in reading order."""
    return tuple(item.name for item in dataclasses.fields(KernelTable) if item.name != "origin")
