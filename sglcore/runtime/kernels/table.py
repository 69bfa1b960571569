"""The kernel table: every numerical operation a model may use, each declared once.

A declaration names the function of `reference.py` that says what the entry means; what a table holds, what the ledger
says, and what the kit compares follow from it. A device replaces entries with `KernelTable.replace`; a function that does
not take every dtype or size says so (`Limited`), and what it replaces stays behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, Self, TypeAlias

from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.runtime.kernels import reference, reference_recurrent
from sglcore.runtime.kernels.entry import Entry, Kernel, entry, optional
from sglcore.runtime.kernels.hisparse import HiSparseKernels
from sglcore.runtime.kernels.row_codec import E4M3FN, FLOATS
from sglcore.runtime.kernels.sparse import SparseKernels
from sglcore.runtime.kernels.speculative import SpeculativeKernels

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def origin_of(kernel: Kernel) -> str:
    """`module:name` of a kernel, as the ledger shows it; of its type, if the kernel is an object without a name."""
    function = kernel.func if isinstance(kernel, functools.partial) else kernel
    named = function if isinstance(function, _FUNCTIONS) else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def takes_all(*call: object) -> str:
    """Of a function that takes whatever its entry may be called with."""
    return ""


def takes_one_dtype(*call: object) -> str:
    """Of a function whose tensors have one dtype."""
    found = dict.fromkeys(str(arg.dtype).removeprefix("torch.") for arg in call if isinstance(arg, Tensor))
    return "" if len(found) < 2 else f"it takes tensors of one dtype, not of {' and '.join(found)}"


@dataclass(frozen=True, slots=True)
class Limited:
    """A function that takes only some of what its entry may be called with.

    `takes(*call)` has the parameters of the entry and gives the reason why such a call is not for this function, or "". It
    looks at dtypes and sizes, but not at the number of rows or at strides: tensors come without content (torch's device
    `meta`), what is neither a tensor, a number nor text as None. It is asked before anything runs, never by a call.
    """

    function: Kernel
    takes: Callable[..., str] = takes_all


Given: TypeAlias = Kernel | Limited | tuple[Limited, ...] | None
"""What a table's entry is made of: a function, one that takes some calls, candidates in order, or nothing."""


class KernelTable(SpeculativeKernels, SparseKernels, HiSparseKernels):
    """One function for each operation. T tokens, H hidden size, D head size, I intermediate size, E experts, K of them a token.

    No entry reads a device value on the host, and every entry accepts T = 0. Results are new tensors unless the entry
    says otherwise. Inputs may be row-strided views whose last dimension is contiguous. Unless noted, results have the
    dtype of the first argument, and sums are accumulated in float32 or wider.
    """

    linear = entry(reference.linear, shapes=(("T K", "80 K", None), ("T K", "17 K", "17")))
    """`linear(x [T, in], weight [out, in], bias [out] | None) -> [T, out]`; takes plain and packed weights."""
    pack_linear = entry(reference.pack_linear)
    """`pack_linear(weight [out, in]) -> weight`: the form that `linear` reads fastest, made once after loading.

    The result has the same shape; the plain weight is dropped. May return its argument, and does where the preferred
    `linear` refuses such a weight: what serves instead reads plain weights.
    """
    embedding = entry(reference.embedding)
    """`embedding(ids int [T], weight [vocab, H]) -> [T, H]`; every id is below vocab."""
    rms_norm = entry(reference.rms_norm, shapes=(("T H", "H", 1e-5), ("T 4 D", "D", 1e-6), ("T H", "H*", 1e-5)))
    """`rms_norm(x [..., N], weight [N], eps) -> [..., N]`: x / sqrt(mean(x^2) + eps) in float32, cast to weight's dtype, times
    weight. That is x's dtype, or float32: then the product is the one thing that is cast.
    """
    add_rms_norm = entry(
        reference.add_rms_norm,
        spoils=("x", "residual"),
        shapes=(("T H", "T H", "H", 1e-5), ("T H", "T H", "H*", 1e-5)),
    )
    """`add_rms_norm(x [T, H], residual [T, H], weight [H], eps) -> (normed, residual)`: residual + x, and its norm.

    May write its results into `x` and `residual`; the caller uses neither afterwards.
    """
    layer_norm = entry(reference.layer_norm, shapes=(("T H", "H", "H", 1e-5),))
    """`layer_norm(x [T, H], weight [H], bias [H], eps) -> [T, H]`."""
    rotary = entry(reference.rotary)
    """`rotary(q [T, heads * D], k [T, kv_heads * D], positions int [T], cos_sin_cache float32 [P, R], D) -> (q, k)`.

    Rotates the first R <= D elements of each head in pairs (i, i + R / 2); the others pass. Row p of the cache is
    R / 2 cosines, then R / 2 sines, of position p; they are cast to q's dtype before use. Every position is below P.
    """
    silu_and_mul = entry(reference.silu_and_mul, shapes=(("T 2I",),))
    """`silu_and_mul(x [T, 2 * I]) -> [T, I]`: silu(x[:, :I]) * x[:, I:], silu cast to x's dtype before the product."""
    gelu_tanh_and_mul = entry(reference.gelu_tanh_and_mul, shapes=(("T 2I",),))
    """`gelu_tanh_and_mul(x [T, 2 * I]) -> [T, I]`: as `silu_and_mul`, by x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    gelu = entry(reference.gelu, shapes=(("T I",),))
    """`gelu(x [T, I]) -> [T, I]`: x * Phi(x), with the exact error function."""
    sigmoid = entry(reference.sigmoid, shapes=(("T I",),))
    """`sigmoid(x [T, I]) -> [T, I]`: 1 / (1 + exp(-x))."""
    softcap = entry(reference.softcap, shapes=(("T I", 3.0),))
    """`softcap(x [T, I], cap) -> [T, I]`: cap * tanh(x / cap)."""
    top_k_routing = entry(reference.top_k_routing)
    """`top_k_routing(logits [T, E], K, normalize) -> (weights [T, K] of logits' dtype, ids int32 or int64 [T, K])`.

    The K largest of softmax(logits) in float32, largest first; `normalize` divides them by their sum.
    """
    sigmoid_routing = entry(reference.sigmoid_routing)
    """`sigmoid_routing(logits [T, E], bias float32 [E], K, groups, top_groups, normalize, scale) -> (weights [T, K] of logits'
    dtype, ids int32 or int64 [T, K])`.

    The K largest of sigmoid(logits) + bias, largest first, in the `top_groups` groups of E / groups neighbours whose two largest
    have the largest sums. Weights are sigmoid(logits); `normalize` divides them by their sum; times `scale`.
    """
    group_limited_routing = entry(reference.group_limited_routing)
    """`group_limited_routing(logits [T, E], K, groups, top_groups, scale) -> (weights [T, K] of logits' dtype, ids int32 or int64
    [T, K])`: the K largest of softmax(logits) in float32, largest first, in the `top_groups` groups of E / groups neighbours that have
    the largest; times `scale`.
    """
    moe = entry(reference.moe)
    """`moe(hidden [T, H], weights [T, K], ids int [T, K], w13 [E, 2 * I, H], w2 [E, H, I]) -> [T, H]`.

    Sum over k of weights[t, k] * w2[e] @ silu_and_mul(w13[e] @ hidden[t]) with e = ids[t, k], added by ascending expert
    in hidden's dtype. An id of -1 means no expert and adds nothing, whatever its weight and its row contain.
    """
    relu2_moe = entry(reference.relu2_moe)
    """`relu2_moe(hidden, weights, ids, w1 [E, I, H], w2 [E, H, I]) -> [T, H]`: as `moe`, of w2[e] @ max(w1[e] @ hidden[t], 0)^2."""
    clamped_moe = entry(reference.clamped_moe)
    """`clamped_moe(hidden, weights, ids, w13, b13 [E, 2 * I], w2, b2 [E, H], alpha, limit) -> [T, H]`: as `moe`, of experts with
    biases, whose rows of `w13` are gate and up in turn. Inside, gate is at most `limit`, up within it, and
    (up + 1) * gate * sigmoid(alpha * gate) is taken.
    """
    limited_moe = entry(reference.limited_moe)
    """`limited_moe(hidden, weights, ids, w13, w2, limit) -> [T, H]`: as `moe`, of `limited_silu_and_mul`."""
    limited_silu_and_mul = entry(reference.limited_silu_and_mul, shapes=(("T 2I", 0.7),))
    """`limited_silu_and_mul(x [T, 2 * I], limit) -> [T, I]`: silu(x[:, :I]), of at most `limit`, * x[:, I:], within it."""
    sqrtsoftplus_routing = entry(reference.sqrtsoftplus_routing)
    """`sqrtsoftplus_routing(logits [T, E], bias float32 [E], K, scale) -> (weights [T, K] of logits' dtype, ids int32 or int64
    [T, K])`: the K largest of sqrt(softplus(logits)) + bias, largest first; weights without the bias over their sum, times `scale`.
    """
    hash_routing = entry(reference.hash_routing)
    """`hash_routing(logits [T, E], input_ids int [T], table int32 [vocab, K], scale) -> (weights, ids)`: the same weights, of the
    experts that the table has for each token."""
    store_kv = entry(reference.store_kv, writes=("k_cache", "v_cache"))
    """`store_kv(key, value [T, kv_heads, D], k_cache, v_cache [cells, kv_heads, D], out_cache_loc int [T])`.

    Of cell-major pools, as the two below that store: another pool has a `store` of its own (`runtime/memory/pools.py`).
    Writes row t into cell out_cache_loc[t] of both caches, cast to their dtype. Cells are distinct, except that any
    number of padding rows may name cell 0, whose content is never read.
    """
    cache_locations = entry(reference.cache_locations, writes=("out_cache_loc",))
    """`cache_locations(page_table int32 [slots, P], slots int32 [T], positions int32 [T], page_size, out_cache_loc int [T])`.

    Writes page_table[slots, positions // page_size] * page_size + positions % page_size into `out_cache_loc`.
    """
    causal_conv = entry(reference_recurrent.causal_conv, writes=("tails",))
    """`causal_conv(x [T, C], weight [W, C], bias [C] | None, silu: bool, tails [S, W - 1, C], slots int32 [B], starts int32
    [B] | None, lengths int32 [B] | None, targets int32 [B] | None) -> [T, C]`: sum over j of weight[j] * x[t - W + 1 + j], and its silu if wanted.

    This and the two below keep a state for each row: row r's in slots[r] of a pool of S, which they read and write in
    place. Its tokens are [starts[r], starts[r] + lengths[r]), a continuation of what the state knows; where both are None,
    row r is token r. Slots are distinct, except that any number of padding rows have slot 0: they write nothing, and their
    tokens and nobody's give zeros. With `targets` what a state becomes is written to targets[r] of the pool, nowhere where that
    is 0, and its own place stays as it is; targets are nobody else's slots. A tail is a slot's last W - 1 rows of x, in its dtype, the latest last.
    """
    gated_delta_rule = entry(reference_recurrent.gated_delta_rule, writes=("states",))
    """`gated_delta_rule(qkv [T, 2 * Hk * K + H * V], a, b [T, H], a_log, dt_bias float32 [H], states float32 [S, H, K, V],
    slots, starts, lengths, targets) -> [T, H * V]`; head h has query and key head h // (H / Hk), which are brought to length 1.

    S = exp(-exp(a_log) softplus(a + dt_bias)) S, then S += k (sigmoid(b) (v - S^T k))^T, then S^T q / sqrt(K).
    """
    selective_scan = entry(reference_recurrent.selective_scan, writes=("states",))
    """`selective_scan(xbc [T, H * P + 2 * G * N], dt [T, H], a_log, d, dt_bias float32 [H], dt_min, dt_max, states float32
    [S, H, P, N], slots, starts, lengths, targets) -> [T, H * P]`; head h has B and C of group h // (H / G).

    dt = softplus(dt + dt_bias) within [dt_min, dt_max]; S = exp(-exp(a_log) dt) S + dt x B^T, then S C + d x.
    """
    gated_rms_norm = entry(
        reference_recurrent.gated_rms_norm,
        shapes=(("T 2D", "T 2D", "1 D", 1e-5, False), ("T 4D", "T 4D", "2 2D", 1e-6, True)),
    )
    """`gated_rms_norm(x [T, N], gate [T, N], weight [G, size], eps, gate_first: bool) -> [T, N]`: each `size` elements of a
    row, in float32, times silu(gate) before or after their norm; the rows of the weight serve in turn.
    """
    draw = entry(reference.draw)
    """`draw(logits float [B, V], state, tables) -> (tokens int32 [B], bad bool [B])`: the sampler's draw, to the bit.

    `tables` are those of the vocabulary. Logits are not changed. A bad row holds NaN, +inf or nothing but -inf; its
    token is 0. A greedy row's token is its first largest logit.
    """
    greedy = optional(reference.greedy, rests_on=("draw",))
    """`greedy(logits float [B, V]) -> (tokens int32 [B], bad bool [B])`: `draw` where every row is greedy. None: torch's."""
    mxfp4_moe = optional(reference.mxfp4_moe)
    """`mxfp4_moe(hidden, weights, ids, w13 uint8 [E, 2 * I, H / 32, 16], s13 uint8 [E, 2 * I, H / 32], b13, w2 uint8
    [E, H, I / 32, 16], s2 uint8 [E, H, I / 32], b2, alpha, limit) -> [T, H]`: `clamped_moe` of weights in MXFP4 (OCP Microscaling
    Formats 1.0), the lower four bits of a byte first, in hidden's dtype. None: such weights are dequantised as they are loaded.
    """
    rotary_and_store = optional(
        reference.rotary_and_store, rests_on=("rotary", "store_kv"), writes=("k_cache", "v_cache")
    )
    """`rotary_and_store(q, k, v [T, kv_heads * D], positions, cos_sin_cache, D, k_cache, v_cache, out_cache_loc) -> q`.

    `rotary` of q and k, then `store_kv` of that k and of v, in one pass. None: a layer calls the two.
    """
    norm_rotary_and_store = optional(
        reference.norm_rotary_and_store,
        rests_on=("rms_norm", "rotary", "store_kv", "rotary_and_store"),
        writes=("k_cache", "v_cache"),
    )
    """`norm_rotary_and_store(q, k, v, positions, cos_sin_cache, D, k_cache, v_cache, out_cache_loc, q_weight [D],
    k_weight [D], eps) -> q`.

    `rms_norm` of each head of q and of k, then `rotary_and_store`, in one pass. None: a layer calls the parts.
    """
    gated_linear = optional(reference.gated_linear, rests_on=("linear", "silu_and_mul"), shapes=(("T K", "80 K"),))
    """`gated_linear(x [T, in], weight [2 * I, in]) -> [T, I]`: `silu_and_mul(linear(x, weight, None))` in one pass.

    Takes plain and packed weights. None: a layer calls the two.
    """
    pack_quantized = optional(reference.pack_quantized, rests_on=("linear",))
    """`pack_quantized(codes) -> weight`: a quantised checkpoint's weight in a form that `linear` reads, its codes as they are.

    The result has the shape [N, K] of the codes, which are dropped, and their `dtype`. None: such weights are dequantised
    as they are loaded.
    """
    quantize_linear = optional(reference.quantize_linear, rests_on=("linear",))
    """`quantize_linear(weight [out, in], "int8" or "int4") -> weight`: rounded to that many bits, in a form that `linear`
    reads. The result has the same shape; the plain weight is dropped. None: this device does not quantise.
    """
    pack_parts = optional(reference.pack_parts, rests_on=("linear", "pack_linear"))
    """`pack_parts(parts, each [rows, in], done) -> weight`: `pack_linear` of the parts one below the other, read where they
    lie: in a mapped file, at any address. `done(place)` when a part is read. None as the result where they do not fit this
    form; then nothing was read.

    None as the entry: parts are copied side by side first.
    """
    pack_head = optional(reference.pack_head, rests_on=("linear", "embedding"))
    """`pack_head(weight [vocab, H]) -> weight`: `pack_linear` for the output layer, whose weight may be the embedding's.

    Giving it promises that `embedding` reads, beside plain weights, what this entry, `pack_quantized` and
    `quantize_linear` make. None: a weight that is both stays plain, and any other output layer is a linear layer.
    """
    head = optional(reference.head, rests_on=("linear",), shapes=(("T H", "29 H"),))
    """`head(hidden [N, H], weight [vocab, H]) -> float32 [N, vocab]`: the values of `linear(hidden, weight, None).float()`,
    in one pass. Takes plain and packed weights. None: the model calls the two.
    """

    origin: Mapping[str, str]
    """Which implementation each entry that is there is, as `module:name`."""
    candidates: Mapping[str, tuple[Limited, ...]]
    """What may serve each entry, the preferred first; the attribute of the entry's name is the function of that one. The last
    of a required entry takes everything."""
    refused: tuple[str, ...]
    """What was to serve some entry and is not there, each with its reason and its remedy; the ledger has them."""
    float8: str
    """The form of 8-bit floats that its functions are to read, one of `row_codec.FLOATS`: rows in eight bits are kept in it."""
    activation_bits: int
    """Bits to which `linear` rounds what it multiplies with codes of `pack_quantized` and `quantize_linear`; 0: it does not."""

    def __init__(self, **entries: Given) -> None:
        """The reference, but for these entries. Raises ConfigError for a name that is not an entry."""
        declared = self.declared()
        if unknown := sorted(entries.keys() - declared.keys()):
            raise ConfigError(
                f"the kernel table has no entry {', '.join(unknown)}", wanted=f"one of {', '.join(declared)}"
            )
        candidates = {name: _candidates(() if one.is_optional else one.reference) for name, one in declared.items()}
        for name, given in entries.items():
            behind = candidates[name] if isinstance(given, Limited) else ()
            candidates[name] = (*_candidates(given), *behind)
        held = {name: found[0].function if found else None for name, found in candidates.items()}
        origin = {name: origin_of(function) for name, function in held.items() if function is not None}
        self.__dict__.update(held, origin=MappingProxyType(origin), candidates=MappingProxyType(candidates))
        self.__dict__.update(refused=(), float8=E4M3FN, activation_bits=0)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a kernel table can not be set: `replace` gives another table")

    @classmethod
    def declared(cls) -> dict[str, Entry[Any]]:
        """Every entry by its name, in reading order."""
        return {
            name: one for kind in reversed(cls.__mro__) for name, one in vars(kind).items() if isinstance(one, Entry)
        }

    @classmethod
    def complete(cls) -> Self:
        """The table of what every entry means: the reference, for optional ones too."""
        return cls(**{name: one.reference for name, one in cls.declared().items()})

    @property
    def replaced(self) -> dict[str, str]:
        """The origin of every entry that is not the reference."""
        declared = self.declared()
        return {
            name: origin for name, origin in self.origin.items() if vars(self)[name] is not declared[name].reference
        }

    def replace(self, **entries: Kernel | Limited | None) -> Self:
        """A new table with some entries replaced; raises `ConfigError` for a name that is not an entry.

        What a `Limited` function replaces serves what it does not take. An optional entry that rests on a replaced one goes,
        unless it is replaced too.
        """
        gone = {name: () for name, one in self.declared().items() if not entries.keys().isdisjoint(one.rests_on)}
        behind = {**self.candidates, **gone}
        new = {name: (one, *behind.get(name, ())) if isinstance(one, Limited) else one for name, one in entries.items()}
        return self._like(type(self)(**{**behind, **new}))

    def refusing(self, *reasons: str) -> Self:
        """The same table, which names these among `refused` too."""
        return self._like(self, refused=(*self.refused, *reasons))

    def storing(self, float8: str) -> Self:
        """The same table, with rows in eight bits in this form; raises `ConfigError` for one that is none."""
        if float8 not in FLOATS:
            raise ConfigError(f"rows in eight bits are to be in {float8!r}", wanted=f"one of {', '.join(FLOATS)}")
        return self._like(self, float8=float8)

    def rounding(self, activation_bits: int) -> Self:
        """The same table, whose products with codes round activations to so many bits."""
        return self._like(self, activation_bits=activation_bits)

    def _like(self, other: Self, **changes: object) -> Self:
        """The entries of another table, and beside them what this one has, but for changes."""
        new = type(self)(**other.candidates)
        kept = {"refused": self.refused, "float8": self.float8, "activation_bits": self.activation_bits}
        new.__dict__.update(kept | changes)
        return new


def _candidates(given: Given) -> tuple[Limited, ...]:
    if isinstance(given, tuple):
        return given
    if given is None:
        return ()
    return (given if isinstance(given, Limited) else Limited(given),)
