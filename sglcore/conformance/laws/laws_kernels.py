"""Laws of level C3 (kernels and attention): every entry of the device's kernel table against the
reference, with guards around the memory that it may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.conformance.inputs.kernel_cases import KernelCase, kernel_cases
from sglcore.conformance.inputs.kernel_inputs import Built
from sglcore.conformance.inputs.kernel_taking import PACKS, Taking
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken, NotApplicable
from sglcore.conformance.mutants import mutants_kernels
from sglcore.conformance.target import Target
from sglcore.core.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import choose
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.table import KernelTable, origin_of

OWN_LOOPS: Mapping[str, Any] = MappingProxyType(
    {"enabled": False, "deterministic": None, "allow_tf32": None, "fp32_precision": None}
)
"""Flags that turn oneDNN off for the reference on the host and keep all else: oneDNN of torch 2.11
spreads a row of NaN over other rows of its tile."""

GUARD = 8
"""Elements before and after a tensor that must not change."""

RELATIVE = MappingProxyType({"float32": 2e-5, "bfloat16": 2e-2, "float16": 2.5e-3, "float8": 8e-2})
"""Allowed error, relative to the result's largest value or to 1. One rounding is 4e-3 in bfloat16
and 5e-4 in float16; sums may have any order. Rows in eight bits may differ by one step, which is
7e-2."""


CELLS = frozenset({"out_cache_loc", "out_rows", "writes"})
"""The names of arguments that hold indices of KV slots or rows. They get the dtype that the
device's facts name."""


class Guarded:
    """A copy of the tensor `host` on the device, in `tensor`, with the same strides and with GUARD
    elements of `pattern` before and after its storage. It keeps a copy of the content on the host,
    so that two checks can tell what a kernel wrote."""

    def __init__(self, host: Tensor, device: str, pattern: float) -> None:
        span = _span(host)
        self._pattern = pattern
        self._whole = torch.full((span + 2 * GUARD,), pattern, dtype=host.dtype, device=device)
        self.tensor = self._whole.as_strided(host.shape, host.stride(), GUARD)
        self.tensor.copy_(host)
        self._before = self._whole.to("cpu", copy=True)
        self._host = host

    def is_unchanged(self) -> bool:
        """Return whether nothing was written: not the tensor, its guards, or the gaps between its
        rows. Waits for the device."""
        return _same_bits(self._whole.cpu(), self._before)

    def guards_hold(self) -> bool:
        """Return whether nothing but the tensor's own elements was written. Waits for the
        device."""
        now = self._whole.to("cpu", copy=True)
        now.as_strided(self._host.shape, self._host.stride(), GUARD).copy_(
            self._before.as_strided(self._host.shape, self._host.stride(), GUARD)
        )
        return _same_bits(now, self._before)


def _span(host: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, including gaps; 0 for an
    empty tensor."""
    if not host.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def kernel_is_reference(trial: Trial) -> None:
    """Check one entry over all its cases: of the preferred kernel table, or for the case
    `table/entry` of the named one. Raises LawBroken if a case is wrong, NotApplicable if the table
    has no such entry."""
    name, _, entry = trial.case.rpartition("/")
    harness = trial.kit.harness("dense", **({"kernels": name} if name else {}))
    table: KernelTable = harness.started.built["kernels"]
    if getattr(table, entry) is None:
        raise NotApplicable(f"the kernel table has no {entry}")
    compare(trial, table, harness.facts)


def compare(trial: Trial, table: KernelTable, facts: Facts) -> None:
    """Compare the entry that the trial's case names with the reference, in the dtypes of these
    facts. Each case runs on the candidate that a model would get. Raises LawBroken for a wrong
    result, a write to other memory, and for a candidate that refuses every case or misstates what
    it takes; a single case that a candidate refuses by a ConfigError is skipped."""
    entry = table.declared()[trial.case.rpartition("/")[2]]
    device, cells = facts.tensor_device, getattr(torch, facts.index_dtype)
    taking = Taking(table, entry)
    for case in kernel_cases(entry, facts.dtypes, table.float8):
        args = [arg.to(cells) if name in CELLS else arg for name, arg in _named(entry, case.args)]
        one = taking.table_for(case, args)
        if one is None:
            continue
        try:
            _check_call(trial, one, entry, args, case, device, taking.watched(case, one))
        except ConfigError as refusal:
            taking.refused(str(refusal))
    taking.check()


def _named(entry: Entry[Any], args: Sequence[Any]) -> Iterator[tuple[str | None, Any]]:
    """Return pairs of (name of the entry's parameter, argument). Entries that pack weights get
    other arguments than their own; these have the name None."""
    names = (None,) * len(args) if entry.name in PACKS else entry.parameters
    return zip(names, args, strict=True)


@torch.inference_mode()
def _check_call(
    trial: Trial,
    table: KernelTable,
    entry: Entry[Any],
    args: Sequence[Any],
    case: KernelCase,
    device: str,
    watched: AbstractContextManager[None],
) -> None:
    wanted_args = [arg.clone() if isinstance(arg, Tensor) else _built(arg, "cpu") for arg in args]
    with torch.backends.mkldnn.flags(**OWN_LOOPS):
        wanted = _call(table.complete(), entry, wanted_args)
    guarded = {place: Guarded(arg, device, -3) for place, arg in enumerate(args) if isinstance(arg, Tensor)}
    given = [guarded[place].tensor if place in guarded else _built(arg, device) for place, arg in enumerate(args)]
    with watched:
        found = _call(table, entry, given)
    names = [name for name, _ in _named(entry, args)]
    for place, guard in guarded.items():
        if names[place] not in entry.writes + entry.spoils and not guard.is_unchanged():
            raise LawBroken(f"{trial.case}, {case.text}: argument {place} was written")
        if not guard.guards_hold():
            raise LawBroken(f"{trial.case}, {case.text}: memory next to argument {place} was written")
    found, wanted = (
        (*result, *(arg for name, arg in _named(entry, arguments) if name in entry.writes))
        for result, arguments in ((found, given), (wanted, wanted_args))
    )
    _compare(trial, case, found, wanted)


def _built(arg: Any, device: str) -> Any:
    return arg.make(device) if isinstance(arg, Built) else arg


def _call(table: KernelTable, entry: Entry[Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the results of an entry as a tuple, () for None. For an entry that packs a weight,
    these are the results of the entry that reads that weight."""
    found = _through_packing(table, entry.name, args) if entry.name in PACKS else getattr(table, entry.name)(*args)
    if found is None:
        return ()
    return found if isinstance(found, tuple) else (found,)


def _through_packing(table: KernelTable, entry: str, args: Sequence[Any]) -> tuple[Tensor, ...]:
    x, weight, *rest = args
    if entry == "head":
        packed = weight if table.pack_head is None else table.pack_head(weight)
        return tuple(getattr(table, entry)(x, form) for form in (weight, packed))
    takes = (weight, *rest) if entry == "quantize_linear" else (weight,)
    if entry == "pack_parts":
        takes = (weight.split([16, weight.shape[0] - 16]), lambda place: None)
    made = getattr(table, entry)(*takes)
    packed = table.pack_linear(weight) if made is None and entry == "pack_parts" else made
    assert packed is not None
    wanted = weight.codes.shape if entry == "pack_quantized" else weight.shape
    if packed.shape != wanted:
        raise LawBroken(f"{entry} made the shape {tuple(packed.shape)}, wanted {tuple(wanted)}")
    bias = rest[0] if entry == "pack_linear" else None
    product = _product(table, entry, x, packed, bias)
    return (product, table.embedding(rest[0], packed)) if entry == "pack_head" else (product,)


def _product(table: KernelTable, entry: str, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [T, in] times a packed weight [out, in], by the `linear` that a model with this
    weight would use. If the preferred `linear` refuses the weight, another one reads it; that one
    knows plain weights only, so the packed weight must be plain: raises LawBroken if it can not
    read it."""
    plain = torch.empty(packed.shape, dtype=x.dtype, device="meta")
    linear = choose(table, KernelTable.linear, (x, plain, bias))
    try:
        return linear(x, packed, bias)
    except Exception as error:
        if linear is table.linear:
            raise
        refuses = origin_of(table.linear)
        raise LawBroken(
            f"{entry} packs a weight that {refuses} refuses, and {origin_of(linear)} cannot read it: {error}"
        ) from error


def _compare(trial: Trial, case: KernelCase, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    entry = trial.case
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.shape != other.shape or (one.dtype != other.dtype and other.is_floating_point()):
            raise LawBroken(
                f"{entry}, {case.text}: result {number} is {one.shape} {one.dtype}, wanted {other.shape} {other.dtype}"
            )
        host, dtype = one.cpu(), _computed_in(case.args, other)
        codec = next((arg for arg in case.args if isinstance(arg, RowCodec)), None)
        if codec is not None and other.dtype == torch.uint8:
            host, other, dtype = codec.decode(host), codec.decode(other), "float8"
        if not other.is_floating_point():
            if not torch.equal(host.long(), other.long()):
                raise LawBroken(f"{entry}, {case.text}: result {number} differs from the reference's integers")
            continue
        error = relative_error(host, other)
        trial.note(error, dtype)
        bound = trial.tolerance(dtype)
        if not error <= bound:
            what = f"{entry}, {case.text}: result {number} differs by {error:.3g}, {bound:g} is allowed"
            raise LawBroken(f"{what}{_not_finite(host, other)}")


def _not_finite(found: Tensor, wanted: Tensor) -> str:
    """Return text that says where one of the two is finite and the other is not; empty if
    nowhere."""
    apart = [(found, wanted, "the device's value"), (wanted, found, "the reference's value")]
    texts = []
    for one, other, what in apart:
        places = (other.isfinite() & ~one.isfinite()).nonzero().tolist()
        if places:
            texts.append(
                f"; {what} is {one[tuple(places[0])].item()} at {places[0]} and not finite at {len(places) - 1} more"
            )
    return "".join(texts)


def _computed_in(args: Sequence[Any], result: Tensor) -> str:
    """Return the name of the dtype that rounds a result: that of the first floating-point argument,
    or else of the result."""
    given = (arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
    return str(next(given, result.dtype)).removeprefix("torch.")


def check_rows(trial: Trial, found: Tensor, wanted: Tensor, dtype: str, what: Callable[[int], str]) -> None:
    """Note the error of `found` against `wanted` (rows in the first dimension) in the trial, and
    raise LawBroken if it is more than this law allows in a dtype; `what` gets the number of the
    first such row and returns its name."""
    error, bound = relative_error(found, wanted), trial.tolerance(dtype)
    trial.note(error, dtype)
    if not error <= bound:
        row = next(i for i in range(len(wanted)) if not relative_error(found[i], wanted[i]) <= bound)
        raise LawBroken(f"{what(row)} differs by {error:.3g}, {bound:g} is allowed")


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest absolute value in `wanted` or to 1;
    infinity where only one of the two is finite, 0 where neither is, and for empty tensors.
    """
    if not wanted.numel():
        return 0.0
    one, other = found.double(), wanted.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (values.nan_to_num(0, 0, 0) for values in (one, other))
    return float((one - other).abs().max() / other.abs().max().clamp(min=1))


def entries(target: Target) -> tuple[str, ...]:
    """Return the law's cases: every entry of the device's preferred table, and as `table/entry`
    those that its other tables replace. All entries if a table can not be made, if a mutant may add
    one, or if the device has another kind of table. A table that refuses this machine with a
    ConfigError has none."""
    declared = tuple(KernelTable.declared())
    if target.mutant is not None or "torch_runtime" not in target.capabilities():
        return declared
    first, *others = target.package.kernels
    try:
        cases = list(target.make_kernels(first).origin)
    except Exception:  # The law makes the table too, and says why it can not.
        cases = list(declared)
    return (*cases, *(f"{name}/{entry}" for name in others for entry in _replaced(target, name)))


def _replaced(target: Target, name: str) -> Sequence[str]:
    try:
        return tuple(target.make_kernels(name).replaced)
    except ConfigError:
        return ()
    except Exception:
        return tuple(KernelTable.declared())


LAWS: tuple[Law, ...] = (
    Law(
        name="kernel_is_reference",
        level="C3",
        says="Every kernel gives what the reference gives, for any number of rows and any stride, "
        "and writes nothing else.",
        check=kernel_is_reference,
        mutants=mutants_kernels.MUTANTS,
        needs=frozenset({"torch_runtime"}),
        tolerance=RELATIVE,
        cases=entries,
    ),
)
