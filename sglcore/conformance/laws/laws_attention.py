"""Laws of level C3 (kernels and attention): every attention backend of the package against the
reference, over a pool in which every KV slot that must not be read holds NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.attention_cases import (
    EXTRAS,
    LIFT,
    MODES,
    TREE,
    Contents,
    Probe,
    Seen,
    attend,
    draw_contents,
    expected_cells,
    without_hidden,
)
from sglcore.conformance.inputs.kit_models import CONTEXT
from sglcore.conformance.kit_run import LARGE, Trial
from sglcore.conformance.law import Law, LawBroken, NotApplicable
from sglcore.conformance.laws.laws_kernels import check_rows
from sglcore.conformance.mutants import mutants_attention as broken
from sglcore.conformance.mutants.mutants_facts import READS_LENGTHS
from sglcore.conformance.target import Target, reads_heads
from sglcore.core.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.memory.pools import POOL_KINDS
from sglcore.step.host_values import host_arrays
from sglcore.worker.schedule_batch import ForwardMode

TOLERANCE: Mapping[str, float] = MappingProxyType({"float32": 5e-5, "bfloat16": 3e-2, "float16": 5e-3})
"""For outputs that are means of values around 1."""

ANY_HEADS = (16, 80)
"""Head sizes to try on a backend that takes any; the second is no power of two."""
CLAIMED = ((9, 1), (0, 12), (7, 5))
"""Requests, as (tokens before this step, new tokens), that run in each size that a backend says it
takes."""

HIDDEN = 30.0
"""Keys and values that a row must not see, where NaN would be read and masked."""
BEYOND = 5
"""The most tokens by which an upper bound of a length exceeds it."""


def attention_is_reference(trial: Trial) -> None:
    """Compare one backend in one mode, as the case `backend/mode[/extra]` names them, with the
    reference: its output, and the KV slots that it writes. Raises LawBroken where they differ.
    Without an extra, and for `window`, at several page sizes; `softcap` and `sinks` in up to two
    dtypes, with a sliding window if the backend has that; `tree_mask` without one. Raises
    NotApplicable if the backend does not serve here."""
    backend, mode, asked = (*trial.case.split("/"), "")[:3]
    extra = asked if asked in (*EXTRAS, TREE) else ""
    features = _facts_of(trial, backend).features
    model = "window" if asked not in ("", TREE) and "sliding_window" in features else "dense"
    if mode == "mixed" and not trial.target.facts().allows_mixed_batches:
        raise NotApplicable("the device has no mixed batches")
    starts = _starts(trial.target, backend, bool(extra))
    ran = [_check_start(trial, model, backend, mode, extra, start) for start in starts]
    if not any(ran):
        raise NotApplicable(f"attention {backend!r} does not serve the model {model!r}")


def _check_start(
    trial: Trial, model: str, backend: str, mode: str, extra: str, settings: Mapping[str, str | int]
) -> bool:
    """Start the device with these settings and compare the backend with the reference. Returns
    False if the start is refused, because the backend does not serve the model with them. Raises
    LawBroken if results are wrong."""
    try:
        harness = trial.kit.harness(model, attention_backend=backend, **settings)
    except ConfigError as refusal:
        trial.remember(str(refusal))
        return False
    size = harness.limits.page_size
    reference = trial.kit.reference(model, harness.geometry.head_dim, page_size=size)
    forward_mode, batches = MODES[mode]
    for seed, rows in enumerate(batches[-1:] if extra else batches):
        contents = draw_contents(seed, rows, harness, reference, lift=LIFT if extra in EXTRAS else 0.0)
        contents = without_hidden(contents) if extra == TREE else contents
        again = _other_ways(harness.facts) if mode == "decode" else {}
        found = attend(harness, forward_mode, contents, again, extra)
        wanted = attend(reference, forward_mode, contents, extra=extra)
        text = f"{trial.case}, {harness.geometry.dtype}, pages of {size}, rows {rows}"
        _check_output(trial, harness, found.out, wanted.out, text)
        _check_pool(harness, contents, found, text)
        for way, out in found.again.items():
            _check_output(trial, harness, out, wanted.out, f"{text}, {way}")
    return True


def _other_ways(facts: Facts) -> Mapping[str, Callable[[Any, Probe], Tensor | None]]:
    """Return the other ways to run a decode step: each takes the backend and the probe that ran the
    step, and returns the output, or None where the backend has no such way."""
    return {
        "by a captured plan": partial(_refreshed, facts.needs_host_lengths),
        "by a plan of upper bounds of the lengths": partial(_bounded, facts.needs_host_lengths),
    }


def _refreshed(needs_host_lengths: bool, backend: Any, probe: Probe) -> Tensor | None:
    """Run the step of `probe` again, by a plan for capture that is refreshed with its batch,
    without lengths on the host unless the device or the backend needs them there. Returns the
    output; None if the backend has no plans for capture, or if only the vendor's own graph can run
    this one."""
    view = probe.view
    if "capture" not in backend.facts.features or view is None:
        return None
    plan = backend.capture_plan(Bucket(view.batch_size, view.num_tokens))
    if not needs_host_lengths and not backend.facts.needs_host_lengths:
        view = replace(view, **{spec.name: None for spec in host_arrays(type(view))})
    if backend.refresh(plan, view) is not None:
        return None
    return _run_planned(backend, probe, view, plan)


def _bounded(needs_host_lengths: bool, backend: Any, probe: Probe) -> Tensor | None:
    """Run the step of `probe` again with lengths on the host that are up to `BEYOND` tokens above
    those on the device, as in a speculative step that is queued before the previous one has
    decided. Returns the output; None if the device or the backend needs exact lengths."""
    view = probe.view
    if needs_host_lengths or backend.facts.needs_exact_lengths or view is None:
        return None
    if backend.facts.masks_bounds:
        backend = _masking(backend)
    most = backend.req_to_token_pool.max_tokens
    bounds = {}
    for spec in host_arrays(type(view)):
        mirror = getattr(view, spec.name)
        if mirror is not None:
            bounds[spec.name] = np.minimum(mirror + np.arange(len(mirror), 0, -1, dtype=np.int32) % BEYOND + 1, most)
    view = replace(view, **bounds)
    return _run_planned(backend, probe, view, backend.plan(view))


def _masking(backend: AttentionBackend[Any]) -> AttentionBackend[Any]:
    """Return a backend like this one for steps with upper bounds of lengths (`has_bounds`). KV
    slots of the pool that hold NaN get large values instead: what the backend masks it may read,
    and an engine keeps no NaN there."""
    pool = backend.token_to_kv_pool
    cells = torch.arange(pool.num_cells, dtype=torch.int64, device=backend.req_to_token_pool.page_table.device)
    pool.write_cells(0, cells, *(part.nan_to_num(HIDDEN) for part in pool.read_cells(0, cells)))
    shape = replace(backend.shape, has_bounds=True)
    return type(backend)(shape, backend.req_to_token_pool, pool, backend.kernels, backend.hisparse)


def _run_planned(backend: Any, probe: Probe, view: ForwardBatch, plan: AttentionPlan) -> Tensor:
    """Return the output of `probe` on a batch under this plan, with no runner around it; the
    probe's own `view` stays."""
    kept, view = probe.view, replace(view, plan_record=None)
    view.mark_forward_metadata_ready(plan)
    with forward_context(ForwardContext(backend, view, probe.attention_layers)):
        found = probe(view)
    probe.view = kept
    return found


def attention_takes_what_it_says(trial: Trial) -> None:
    """Check each head size, dtype, page size and layout of a backend's facts (the case names it) at
    least once, in the smallest number of starts. Raises LawBroken if the backend refuses one or
    computes something else than the reference."""
    facts, layout = _facts_of(trial, trial.case), trial.kit.harness("dense").pool.layout
    kinds = {layout: None, **{name: kind for name, kind in POOL_KINDS.items() if name != layout}}
    layouts = [name for name in kinds if facts.takes_layout(name)]
    for head_dim, dtype, size, name in claims(facts, trial.target.facts(), layouts):
        given = {
            "pool_kind": kinds[name],
            "attention_backend": trial.case,
            "page_size": size,
            "dtype": dtype,
            "kv_cache_memory": LARGE,
        }
        try:
            with trial.opened("dense", head_dim=head_dim, **given) as harness:
                reference = trial.kit.reference("dense", head_dim, page_size=size)
                contents = draw_contents(0, CLAIMED, harness, reference)
                found, wanted = (attend(item, ForwardMode.EXTEND, contents) for item in (harness, reference))
                text = f"{trial.case}, heads of {head_dim}, {dtype}, pages of {size}, {name}"
                _check_output(trial, harness, found.out, wanted.out, text)
        except ConfigError as refusal:
            raise LawBroken(
                f"{trial.case} declares heads of {head_dim}, {dtype}, but refuses them: {refusal}"
            ) from refusal


def claims(facts: AttentionFacts, own: Facts, layouts: Sequence[str]) -> Sequence[tuple[int, str, int, str]]:
    """Return (head size, dtype, page size, layout) of each start, so that each value is in at least
    one. Where the backend (`facts`) takes any value, some are chosen; dtypes are limited to those
    of the device (`own`). `layouts`: layouts that the backend takes and that the kit can make."""
    heads = facts.head_dims or ANY_HEADS
    dtypes = [name for name in own.dtypes if facts.dtypes is None or name in facts.dtypes]
    pages = [size for size in facts.page_sizes or (own.page_size,) if size <= CONTEXT]
    every = heads, dtypes, pages, layouts
    count = max(map(len, every)) if all(every) else 0
    return [tuple(values[place % len(values)] for values in every) for place in range(count)]  # pyright: ignore[reportReturnType]


def _facts_of(trial: Trial, backend: str) -> AttentionFacts:
    classes = trial.target.usable_attention()
    if backend not in classes:
        raise NotApplicable(f"attention {backend!r} lacks its library or its hardware here")
    return classes[backend].facts


def _check_output(trial: Trial, harness: Harness, found: Tensor, wanted: Tensor, text: str) -> None:
    check_rows(trial, found, wanted, harness.geometry.dtype, lambda token: f"{text}: token {token} of the batch")


def _check_pool(harness: Harness, contents: Contents, found: Seen, text: str) -> None:
    """Raise LawBroken, with a message that begins with `text`, unless the pool after the step
    (`found`) has the keys and values of `contents` in their KV slots, this step's included, and
    nothing in other slots. Page 0, for padding, is not checked."""
    pool = harness.pool
    size, lengths = pool.page_size, [before + new for before, new in contents.rows]
    for what, parts, after in (("key", contents.keys, found.keys), ("value", contents.values, found.values)):
        wanted = expected_cells(contents, parts, lengths, pool).to(after.dtype)
        wrong = ~(torch.eq(after, wanted) | (after.isnan() & wanted.isnan())).flatten(1).all(1)
        wrong[:size] = False
        if wrong.any():
            cell = int(wrong.nonzero()[0, 0])
            raise LawBroken(
                f"{text}: the {what} in cell {cell} (page {cell // size}) is wrong, or not for this step to write"
            )


def backends(target: Target) -> tuple[str, ...]:
    """Return the names of the package's attention backends, usable here or not, without those that
    read no keys and values of heads; none if the device is not of the torch runtime."""
    if "torch_runtime" not in target.capabilities():
        return ()
    classes = target.importable_attention()
    return tuple(name for name in target.package.attention if name not in classes or reads_heads(classes[name]))


def _starts(target: Target, backend: str, is_extra: bool) -> Sequence[Mapping[str, str | int]]:
    """Return the settings of each start: every page size; for an extra feature, the strictest dtype
    and, if that is float32, a 16-bit dtype."""
    if not is_extra:
        return [{"page_size": size} for size in _page_sizes(target, backend)]
    strict, taken = target.geometry(backend).dtype, target.usable_attention()[backend].facts.dtypes
    half = [name for name in target.facts().dtypes if name != "float32" and (taken is None or name in taken)]
    return [{"dtype": name} for name in dict.fromkeys((strict, *(half[:1] if strict == "float32" else ())))]


def _page_sizes(target: Target, backend: str) -> tuple[int, ...]:
    allowed = target.usable_attention()[backend].facts.page_sizes
    own = target.facts().page_size
    sizes = (1, 4, 16, own) if allowed is None else (*allowed[:2], *(size for size in allowed if size == own))
    return tuple(dict.fromkeys(size for size in sizes if size <= CONTEXT))


def attention_cases(target: Target) -> tuple[str, ...]:
    """Return the cases `backend/mode[/extra]`: each backend of the package in each mode; also with
    a window, with each of `EXTRAS` and with tree rows, if the facts of a backend that is usable
    here name them. Empty if the device is not of the torch runtime."""
    if "torch_runtime" not in target.capabilities():
        return ()
    found: list[str] = []
    classes = target.usable_attention()
    for name in backends(target):
        found += [f"{name}/{mode}" for mode in MODES]
        features = classes[name].facts.features if name in classes else frozenset[str]()
        for asked, feature in (("window", "sliding_window"), *zip(EXTRAS, EXTRAS, strict=True)):
            found += [f"{name}/{mode}/{asked}" for mode in MODES if feature in features]
        found += [f"{name}/decode/{TREE}"] if TREE in features else []
    return tuple(found)


LAWS: tuple[Law, ...] = (
    Law(
        name="attention_is_reference",
        level="C3",
        says="Attention gives what the reference gives, reads and writes no cell but its own, planned, "
        "refreshed, or planned for upper bounds of the lengths.",
        check=attention_is_reference,
        mutants=(*broken.MUTANTS, *broken.FORGETS_EXTRAS, broken.HALF_SCORES, broken.BELIEVES_BOUNDS, READS_LENGTHS),
        needs=frozenset({"torch_runtime", "attention"}),
        tolerance=TOLERANCE,
        cases=attention_cases,
    ),
    Law(
        name="attention_takes_what_it_says",
        level="C3",
        says="Attention gives what the reference gives in every head size, type, page size and layout "
        "that its facts name.",
        check=attention_takes_what_it_says,
        mutants=(broken.POWERS_OF_TWO, broken.TAKES_ALL_FOR_CELLS),
        needs=frozenset({"torch_runtime", "attention"}),
        tolerance=TOLERANCE,
        cases=backends,
        interpreted=frozenset(),
    ),
)
