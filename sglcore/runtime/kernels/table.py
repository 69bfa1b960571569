"""The kernel table: every numerical operation that a model may use, each declared once.

A declaration names the function of `reference_kernels.py` that defines the entry. The contents of a
table, the ledger rows and the comparisons of the conformance kit are derived from it. A device
replaces entries with `KernelTable.replace`. A function that does not take every dtype or size is
wrapped in `Limited`; the function that it replaces remains as the next candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, Self, TypeAlias

from torch import OutOfMemoryError, Tensor

from sglcore.core.errors import ConfigError, SglcoreError, one_line
from sglcore.runtime.kernels import reference_kernels, reference_recurrent
from sglcore.runtime.kernels.entry import Entry, Kernel, entry, optional
from sglcore.runtime.kernels.hisparse_entries import HiSparseKernels
from sglcore.runtime.kernels.row_codec import E4M3FN, FLOATS
from sglcore.runtime.kernels.sparse_entries import SparseKernels
from sglcore.runtime.kernels.speculative_entries import SpeculativeKernels

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def origin_of(kernel: Kernel) -> str:
    """Return `module:name` of a kernel, as the ledger shows it.

    For a partial, the name of its function; for another object without a name, that of its type.
    """
    function = kernel.func if isinstance(kernel, functools.partial) else kernel
    named = function if isinstance(function, _FUNCTIONS) else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def takes_all(*call: object) -> str:
    """Return "": a function with these limits takes every call of its entry."""
    return ""


def takes_one_dtype(*call: object) -> str:
    """Return "" if all tensors of a call have one dtype, otherwise the reason to refuse it."""
    found = dict.fromkeys(str(arg.dtype).removeprefix("torch.") for arg in call if isinstance(arg, Tensor))
    return "" if len(found) < 2 else f"it takes tensors of one dtype, not of {' and '.join(found)}"


class Trial:
    """Small calls of a vendor's library, made once before a model is given its function: a library
    that fails is a refused candidate with a reason, not the end of a start.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        """`run` has the parameters of the entry, as `Limited.takes`. It calls the library on the
        current device with small arguments of these dtypes and sizes and returns the results; it
        raises whatever the library raises.
        """
        self._run = run
        self._failures: dict[str, str] = {}

    def failure(self, *call: object) -> str:
        """Return how the library failed for such a call, empty if it did not. The first time for
        each dtype and size, it runs and waits for the device; later the first answer is returned.
        Raises SglcoreError and OutOfMemoryError, which are no failure of the library.
        """
        key = ", ".join(f"{arg.dtype}{list(arg.shape)}" if isinstance(arg, Tensor) else str(arg) for arg in call)
        if key not in self._failures:
            self._failures[key] = self._tried(call)
        return self._failures[key]

    def _tried(self, call: tuple[object, ...]) -> str:
        try:
            found = self._run(*call)
            for each in found if isinstance(found, tuple) else (found,):
                if isinstance(each, Tensor):
                    each.cpu()
        except (SglcoreError, OutOfMemoryError):
            raise
        except Exception as error:
            return f"its first call failed: {one_line(error)}"
        return ""


@dataclass(frozen=True, slots=True)
class Limited:
    """A function that takes only some calls of its entry.

    `takes(*call)` has the parameters of the entry and returns why such a call is not for this
    function, or "". It checks dtypes and sizes, but neither the number of rows nor strides. Tensors
    come without content (torch's device `meta`); anything other than a tensor, a number or text
    comes as None. It is called before anything runs, never at run time.
    """

    function: Kernel
    takes: Callable[..., str] = takes_all
    trial: Trial | None = None
    """For a function that calls a vendor's library: how it is tried before it is chosen. None: it
    is not tried."""
    library: str = ""
    """The vendor's library that it calls, for the ledger; `KernelTable.offering` sets it. Empty: it
    calls none."""

    def refusal(self, *call: object) -> str:
        """Return why the function does not get calls with these arguments: what `takes` says, or
        else how its trial failed; empty if it gets them. A first trial waits for the device."""
        return self.takes(*call) or ("" if self.trial is None else self.trial.failure(*call))


Given: TypeAlias = Kernel | Limited | tuple[Limited, ...] | None
"""The value of a table's entry: a function, one with limits, candidates in order, or nothing."""


class KernelTable(SpeculativeKernels, SparseKernels, HiSparseKernels):
    """The functions of all declared operations, one for each: `table.linear(x, weight, bias)`.

    T tokens, H hidden size, D head size, I intermediate size, E experts, K per token. No entry
    reads a device value on the host, and every entry accepts T = 0. Results are new tensors unless
    the entry says otherwise. Inputs may be row-strided views with a contiguous last dimension.
    Unless noted, results have the dtype of the first argument, and sums are accumulated in float32
    or wider.
    """

    linear = entry(reference_kernels.linear, shapes=(("T K", "80 K", None), ("T K", "17 K", "17")))
    """`linear(x [T, in], weight [out, in], bias [out] | None) -> [T, out]`; takes plain and packed
    weights.
    """
    pack_linear = entry(reference_kernels.pack_linear)
    """`pack_linear(weight [out, in]) -> weight`: the form that `linear` reads fastest, made once
    after loading.

    The result has the same shape; the plain weight is dropped. It may return its argument, and does
    so if the preferred `linear` refuses such a weight, because the next candidate reads plain
    weights.
    """
    embedding = entry(reference_kernels.embedding)
    """`embedding(ids int [T], weight [vocab, H]) -> [T, H]`; every id is below vocab."""
    rms_norm = entry(reference_kernels.rms_norm, shapes=(("T H", "H", 1e-5), ("T 4 D", "D", 1e-6), ("T H", "H*", 1e-5)))
    """`rms_norm(x [..., N], weight [N], eps) -> [..., N]`: x / sqrt(mean(x^2) + eps), times weight.

    Computed in float32 and cast to the weight's dtype before the product. That dtype is x's, or
    float32; in the latter case the product is cast instead.
    """
    add_rms_norm = entry(
        reference_kernels.add_rms_norm,
        spoils=("x", "residual"),
        shapes=(("T H", "T H", "H", 1e-5), ("T H", "T H", "H*", 1e-5)),
    )
    """`add_rms_norm(x [T, H], residual [T, H], weight [H], eps) -> (normed, residual)`.

    Returns residual + x and its norm. May write its results to `x` and `residual`; the caller must
    not use either afterwards.
    """
    layer_norm = entry(reference_kernels.layer_norm, shapes=(("T H", "H", "H", 1e-5),))
    """`layer_norm(x [T, H], weight [H], bias [H], eps) -> [T, H]`."""
    rotary = entry(reference_kernels.rotary)
    """`rotary(q [T, heads * D], k [T, kv_heads * D], positions int [T], cos_sin_cache float32 [P,
    R], D) -> (q, k)`.

    Rotates the first R <= D elements of each head in pairs (i, i + R / 2); the others do not
    change. Row p of the cache has R / 2 cosines, then R / 2 sines, of position p; they are cast to
    q's dtype before use. Every position is below P.
    """
    silu_and_mul = entry(reference_kernels.silu_and_mul, shapes=(("T 2I",),))
    """`silu_and_mul(x [T, 2 * I]) -> [T, I]`: silu(x[:, :I]) * x[:, I:].

    silu is cast to x's dtype before the product.
    """
    gelu_tanh_and_mul = entry(reference_kernels.gelu_tanh_and_mul, shapes=(("T 2I",),))
    """`gelu_tanh_and_mul(x [T, 2 * I]) -> [T, I]`: as `silu_and_mul`, with another activation.

    It is x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
    """
    gelu = entry(reference_kernels.gelu, shapes=(("T I",),))
    """`gelu(x [T, I]) -> [T, I]`: x * Phi(x), with the exact error function."""
    sigmoid = entry(reference_kernels.sigmoid, shapes=(("T I",),))
    """`sigmoid(x [T, I]) -> [T, I]`: 1 / (1 + exp(-x))."""
    softcap = entry(reference_kernels.softcap, shapes=(("T I", 3.0),))
    """`softcap(x [T, I], cap) -> [T, I]`: cap * tanh(x / cap)."""
    top_k_routing = entry(reference_kernels.top_k_routing)
    """`top_k_routing(logits [T, E], K, normalize) -> (weights [T, K] of logits' dtype, ids int32 or
    int64 [T, K])`.

    The K largest of softmax(logits) in float32, largest first; `normalize` divides them by their
    sum.
    """
    sigmoid_routing = entry(reference_kernels.sigmoid_routing)
    """`sigmoid_routing(logits [T, E], bias float32 [E], K, groups, top_groups, normalize, scale) ->
    (weights [T, K] of logits' dtype, ids int32 or int64 [T, K])`.

    The K largest of sigmoid(logits) + bias, largest first, within the best `top_groups` groups. A
    group is E / groups neighbouring experts, ranked by the sum of its two largest. Weights are
    sigmoid(logits); `normalize` divides them by their sum; times `scale`.
    """
    group_limited_routing = entry(reference_kernels.group_limited_routing)
    """`group_limited_routing(logits [T, E], K, groups, top_groups, scale) -> (weights [T, K] of
    logits' dtype, ids int32 or int64 [T, K])`.

    The K largest of softmax(logits) in float32, largest first, times `scale`, within the best
    `top_groups` groups. A group is E / groups neighbouring experts, ranked by its largest.
    """
    moe = entry(reference_kernels.moe)
    """`moe(hidden [T, H], weights [T, K], ids int [T, K], w13 [E, 2 * I, H], w2 [E, H, I]) -> [T,
    H]`.

    Sum over k of weights[t, k] * w2[e] @ silu_and_mul(w13[e] @ hidden[t]) with e = ids[t, k], added
    by ascending expert in hidden's dtype. An id of -1 means no expert and adds nothing, whatever
    its weight and row contain.
    """
    relu2_moe = entry(reference_kernels.relu2_moe)
    """`relu2_moe(hidden, weights, ids, w1 [E, I, H], w2 [E, H, I]) -> [T, H]`.

    As `moe`, with experts w2[e] @ max(w1[e] @ hidden[t], 0)^2.
    """
    clamped_moe = entry(reference_kernels.clamped_moe)
    """`clamped_moe(hidden, weights, ids, w13, b13 [E, 2 * I], w2, b2 [E, H], alpha, limit) -> [T,
    H]`.

    As `moe`, for experts with biases and with interleaved gate and up rows in `w13`. gate is at
    most `limit`, up within +-`limit`; the activation is (up + 1) * gate * sigmoid(alpha * gate).
    """
    limited_moe = entry(reference_kernels.limited_moe)
    """`limited_moe(hidden, weights, ids, w13, w2, limit) -> [T, H]`: `moe` with
    `limited_silu_and_mul`.
    """
    limited_silu_and_mul = entry(reference_kernels.limited_silu_and_mul, shapes=(("T 2I", 0.7),))
    """`limited_silu_and_mul(x [T, 2 * I], limit) -> [T, I]`: silu(gate) * up.

    gate = x[:, :I] is at most `limit`, up = x[:, I:] within +-`limit`.
    """
    sqrtsoftplus_routing = entry(reference_kernels.sqrtsoftplus_routing)
    """`sqrtsoftplus_routing(logits [T, E], bias float32 [E], K, scale) -> (weights [T, K] of
    logits' dtype, ids int32 or int64 [T, K])`.

    The K largest of sqrt(softplus(logits)) + bias, largest first. Weights are those without the
    bias, divided by their sum, times `scale`.
    """
    hash_routing = entry(reference_kernels.hash_routing)
    """`hash_routing(logits [T, E], input_ids int [T], table int32 [vocab, K], scale) -> (weights,
    ids)`.

    The weights of `sqrtsoftplus_routing`, for the experts that the table has for each token.
    """
    store_kv = entry(reference_kernels.store_kv, writes=("k_cache", "v_cache"))
    """`store_kv(key, value [T, kv_heads, D], k_cache, v_cache [cells, kv_heads, D], out_cache_loc
    int [T])`.

    Writes row t to KV slot out_cache_loc[t] of both caches, cast to their dtype. KV slots are
    distinct, except that any number of padding rows may name KV slot 0, which is never read. For
    cell-major pools only, as are `rotary_and_store` and `norm_rotary_and_store`: other pools have a
    `store` of their own (`runtime/memory/pools.py`).
    """
    cache_locations = entry(reference_kernels.cache_locations, writes=("out_cache_loc",))
    """`cache_locations(page_table int32 [slots, P], slots int32 [T], positions int32 [T],
    page_size, out_cache_loc int [T])`.

    Writes page_table[slots, positions // page_size] * page_size + positions % page_size to
    `out_cache_loc`.
    """
    causal_conv = entry(reference_recurrent.causal_conv, writes=("tails",))
    """`causal_conv(x [T, C], weight [W, C], bias [C] | None, silu: bool, tails [S, W - 1, C], slots
    int32 [B], starts int32 [B] | None, lengths int32 [B] | None, targets int32 [B] | None) -> [T,
    C]`.

    Sum over j of weight[j] * x[t - W + 1 + j], with its silu if `silu`. A tail is a slot's last W -
    1 rows of x, in x's dtype, the latest last.

    This entry, `gated_delta_rule` and `selective_scan` keep a state for each row: that of row r is
    at slots[r] of a pool of S, read and written in place. Its tokens are [starts[r], starts[r] +
    lengths[r]) and continue the state; if both are None, row r is token r. Slots are distinct,
    except that any number of padding rows have slot 0: they write nothing, and their tokens, like
    tokens of no row, give zeros. With `targets` the new state is written to targets[r], nowhere if
    that is 0, and slots[r] does not change; targets are no other row's slots.
    """
    gated_delta_rule = entry(reference_recurrent.gated_delta_rule, writes=("states",))
    """`gated_delta_rule(qkv [T, 2 * Hk * K + H * V], a, b [T, H], a_log, dt_bias float32 [H],
    states float32 [S, H, K, V], slots, starts, lengths, targets) -> [T, H * V]`.

    Head h uses query and key head h // (H / Hk), normalised to length 1. S = exp(-exp(a_log)
    softplus(a + dt_bias)) S, then S += k (sigmoid(b) (v - S^T k))^T, then S^T q / sqrt(K).
    """
    selective_scan = entry(reference_recurrent.selective_scan, writes=("states",))
    """`selective_scan(xbc [T, H * P + 2 * G * N], dt [T, H], a_log, d, dt_bias float32 [H], dt_min,
    dt_max, states float32 [S, H, P, N], slots, starts, lengths, targets) -> [T, H * P]`.

    Head h uses B and C of group h // (H / G). dt = softplus(dt + dt_bias) within [dt_min, dt_max];
    S = exp(-exp(a_log) dt) S + dt x B^T, then S C + d x.
    """
    gated_rms_norm = entry(
        reference_recurrent.gated_rms_norm,
        shapes=(("T 2D", "T 2D", "1 D", 1e-5, False), ("T 4D", "T 4D", "2 2D", 1e-6, True)),
    )
    """`gated_rms_norm(x [T, N], gate [T, N], weight [G, size], eps, gate_first: bool) -> [T, N]`.

    Normalises each `size` elements of a row in float32 and multiplies by silu(gate), before or
    after the norm. The rows of the weight are used in turn.
    """
    draw = entry(reference_kernels.draw)
    """`draw(logits float [B, V], state, tables) -> (tokens int32 [B], bad bool [B])`: the sampler's
    draw, bit for bit.

    `tables` are those of the vocabulary. Logits are not changed. A bad row has NaN, +inf or nothing
    but -inf; its token is 0. The token of a greedy row is its first largest logit.
    """
    greedy = optional(reference_kernels.greedy, rests_on=("draw",))
    """`greedy(logits float [B, V]) -> (tokens int32 [B], bad bool [B])`: `draw` if every row is
    greedy.

    None: torch's functions are used.
    """
    mxfp4_moe = optional(reference_kernels.mxfp4_moe)
    """`mxfp4_moe(hidden, weights, ids, w13 uint8 [E, 2 * I, H / 32, 16], s13 uint8 [E, 2 * I, H /
    32], b13, w2 uint8 [E, H, I / 32, 16], s2 uint8 [E, H, I / 32], b2, alpha, limit) -> [T, H]`.

    `clamped_moe` with MXFP4 weights (OCP Microscaling Formats 1.0), the lower four bits of a byte
    first, computed in hidden's dtype. None: such weights are dequantised on loading.
    """
    rotary_and_store = optional(
        reference_kernels.rotary_and_store, rests_on=("rotary", "store_kv"), writes=("k_cache", "v_cache")
    )
    """`rotary_and_store(q, k, v [T, kv_heads * D], positions, cos_sin_cache, D, k_cache, v_cache,
    out_cache_loc) -> q`.

    `rotary` of q and k, then `store_kv` of k and v, in one pass. None: a layer calls the two.
    """
    norm_rotary_and_store = optional(
        reference_kernels.norm_rotary_and_store,
        rests_on=("rms_norm", "rotary", "store_kv", "rotary_and_store"),
        writes=("k_cache", "v_cache"),
    )
    """`norm_rotary_and_store(q, k, v, positions, cos_sin_cache, D, k_cache, v_cache, out_cache_loc,
    q_weight [D], k_weight [D], eps) -> q`.

    `rms_norm` of each head of q and k, then `rotary_and_store`, in one pass. None: a layer calls
    the parts.
    """
    gated_linear = optional(
        reference_kernels.gated_linear, rests_on=("linear", "silu_and_mul"), shapes=(("T K", "80 K"),)
    )
    """`gated_linear(x [T, in], weight [2 * I, in]) -> [T, I]`: `silu_and_mul(linear(x, weight,
    None))` in one pass.

    Takes plain and packed weights. None: a layer calls the two.
    """
    pack_quantized = optional(reference_kernels.pack_quantized, rests_on=("linear",))
    """`pack_quantized(codes) -> weight`: a quantised weight in a form that `linear` reads, with
    unchanged codes.

    The result has the shape [N, K] of the codes, which are dropped, and their `dtype`. None: such
    weights are dequantised on loading.
    """
    quantize_linear = optional(reference_kernels.quantize_linear, rests_on=("linear",))
    """`quantize_linear(weight [out, in], "int8" or "int4") -> weight`: rounded, in a form that
    `linear` reads.

    The result has the same shape; the plain weight is dropped. None: this device does not quantise.
    """
    pack_parts = optional(reference_kernels.pack_parts, rests_on=("linear", "pack_linear"))
    """`pack_parts(parts, each [rows, in], done) -> weight`: `pack_linear` of the parts concatenated
    by rows.

    Parts are read in place: from a mapped file, at any address. Calls `done(place)` when a part is
    read. Returns None, before reading anything, if they do not fit this form. None as the entry:
    parts are copied into one tensor first.
    """
    pack_head = optional(reference_kernels.pack_head, rests_on=("linear", "embedding"))
    """`pack_head(weight [vocab, H]) -> weight`: `pack_linear` for the output layer, which may be
    tied.

    A device with this entry promises that `embedding` reads plain weights and the results of this
    entry, `pack_quantized` and `quantize_linear`. None: a tied weight stays plain, and any other
    output layer is a linear layer.
    """
    head = optional(reference_kernels.head, rests_on=("linear",), shapes=(("T H", "29 H"),))
    """`head(hidden [N, H], weight [vocab, H]) -> float32 [N, vocab]`: `linear(hidden, weight,
    None).float()` in one pass.

    Takes plain and packed weights. None: the model calls the two.
    """

    origin: Mapping[str, str]
    """The implementation of each entry that exists, as `module:name`."""
    candidates: Mapping[str, tuple[Limited, ...]]
    """The candidates of each entry, the preferred first.

    The table's attribute is the function of the first. The last candidate of a required entry takes
    every call.
    """
    refused: tuple[str, ...]
    """One text for each function that a device could not supply: its entry, the reason and the
    remedy. For the ledger.
    """
    float8: str
    """The 8-bit float format of its functions, one of `row_codec.FLOATS`.

    KV rows in 8 bits use it.
    """
    activation_bits: int
    """Number of bits to which this table's `linear` rounds activations for quantised weights, for
    the ledger; 0: no rounding.

    Quantised weights are those of `pack_quantized` and `quantize_linear`.
    """

    def __init__(self, **entries: Given) -> None:
        """Start from the required entries of the reference and set these entries.

        A `Limited` comes before the reference, which remains the next candidate; any other value
        replaces the reference. Raises ConfigError for a name that is not an entry.
        """
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
        raise AttributeError(f"{name} of a kernel table cannot be set: `replace` returns another table")

    @classmethod
    def declared(cls) -> dict[str, Entry[Any]]:
        """Return every entry by its name, in reading order."""
        return {
            name: one for kind in reversed(cls.__mro__) for name, one in vars(kind).items() if isinstance(one, Entry)
        }

    @classmethod
    def complete(cls) -> Self:
        """Return the table of all references, those of optional entries included."""
        return cls(**{name: one.reference for name, one in cls.declared().items()})

    @property
    def replaced(self) -> dict[str, str]:
        """The origin (`module:name`), by entry, of every entry that has a function other than the
        reference; entries that are None are left out.
        """
        declared = self.declared()
        return {
            name: origin for name, origin in self.origin.items() if vars(self)[name] is not declared[name].reference
        }

    def replace(self, **entries: Kernel | Limited | None) -> Self:
        """Return a table with some entries replaced.

        The candidates that a `Limited` replaces remain after it, for the calls that it refuses. An
        optional entry is dropped if one that it rests on (`Entry.rests_on`) is replaced and it is
        not. Raises `ConfigError` for a name that is not an entry.
        """
        gone = {name: () for name, one in self.declared().items() if not entries.keys().isdisjoint(one.rests_on)}
        behind = {**self.candidates, **gone}
        new = {name: (one, *behind.get(name, ())) if isinstance(one, Limited) else one for name, one in entries.items()}
        return self._like(type(self)(**{**behind, **new}))

    def offering(self, library: str, entry: str, make: Callable[[], Limited]) -> Self:
        """Return the table with the library's function for `entry`, which `make` returns; or, if
        `make` raises, the same table with the reason in `refused`. A SglcoreError is raised.
        `library` is a name for the reason.
        """
        try:
            return self.replace(**{entry: replace(make(), library=library)})
        except ImportError as reason:
            return self.refusing(f"{library} refused for {entry}: {reason}")
        except SglcoreError:
            raise
        except Exception as error:
            return self.refusing(f"{library} refused for {entry}: {one_line(error)}")

    def refusing(self, *reasons: str) -> Self:
        """Return a table with the same functions, and with these reasons added to `refused`."""
        return self._like(self, refused=(*self.refused, *reasons))

    def storing(self, float8: str) -> Self:
        """Return a table with the same functions, and with this format for KV rows in 8 bits, a
        name in `row_codec.FLOATS`.

        Raises `ConfigError` for another name.
        """
        if float8 not in FLOATS:
            raise ConfigError(f"the format of 8-bit rows is {float8!r}", wanted=f"one of {', '.join(FLOATS)}")
        return self._like(self, float8=float8)

    def rounding(self, activation_bits: int) -> Self:
        """Return a table with the same functions and this value of `activation_bits`: it states
        what the device's `linear` does, and changes no function.
        """
        return self._like(self, activation_bits=activation_bits)

    def narrowed(self, name: str, candidates: tuple[Limited, ...]) -> Self:
        """Return this table with only these candidates of the entry `name`; its attributes stay."""
        return self._like(type(self)(**{**self.candidates, name: candidates}))

    def _like(self, other: Self, **changes: object) -> Self:
        """Return a table with the entries of `other`, and with this table's attributes except
        `changes`.
        """
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
