"""Laws of levels C1 (tiny run) and C2 (runner): the device behaves as its facts say.
`laws_package.py` has the law of level C0 on the values that facts may have at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.attention_cases import Rows, draw_contents, schedule_batch
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, one_case
from sglcore.conformance.mutant import TORCH
from sglcore.conformance.mutants import mutants_facts as broken
from sglcore.conformance.target import Target
from sglcore.device.facts import Facts
from sglcore.runtime.readback import ReadbackQueue
from sglcore.runtime.staging import RING
from sglcore.step.host_values import host_arrays
from sglcore.worker.schedule_batch import ForwardMode

WIDE = (torch.int64, torch.uint64)
GIVES_WIDE = frozenset({"argmax", "max", "topk", "sort"})
"""Torch operations that return indices as int64 only. Their results are converted at once."""
CONVERTS = frozenset({"to", "_to_copy"})
DRAWS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1, "min_tokens": 2},
    {"temperature": 0.8, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 1.0}},
    {"temperature": 1.0, "seed": 6, "grammars": (3, None, 4)},
    {"temperature": 1.2, "seed": 7, "top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.01},
)
BUSY, ROUNDS = 512, 6
"""Rows of the matrices that keep the device busy, and the number of copies queued after them."""


def computes_in(trial: Trial) -> None:
    """Run one prompt and two decode steps in the dtype that the case names, and compare
    log-probabilities with the reference. Raises LawBroken where they differ by more than the
    tolerance."""
    harness = trial.kit.harness("dense", dtype=trial.case)
    trial.compare(harness, harness.run(random_prompts(1, (7,)), 3, score_prompts=True))


class Watch(TorchDispatchMode):
    """Torch dispatch mode: inside, an operation that takes or returns a 64-bit integer tensor on
    the given type of device raises LawBroken. Conversions may take one; argmax, max, topk and sort
    may return one.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._type = torch.device(device).type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch operation and return its result. Raises LawBroken for a 64-bit integer
        tensor on the device, unless a conversion takes it or it is the result of argmax, max, topk
        or sort.
        """
        name = func.overloadpacket.__name__
        if name not in CONVERTS:
            self._check(f"{name} receives", (*args, *(kwargs or {}).values()))
        found = func(*args, **(kwargs or {}))
        if name not in GIVES_WIDE:
            self._check(f"{name} returns", (found,))
        return found

    def _check(self, text: str, values: Sequence[Any]) -> None:
        for tensor in _tensors(values):
            if tensor.dtype in WIDE and tensor.device.type == self._type:
                shape = list(tensor.shape)
                raise LawBroken(f"{text} {tensor.dtype} {shape} on {tensor.device}, where index_dtype is 'int32'")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def integers_are_narrow(trial: Trial) -> None:
    """Run prompts, decode steps, scores, penalties, cut-offs, bias and masks; raise LawBroken if a
    torch operation takes or returns a 64-bit integer tensor on the device, except operations that
    return no other type, and conversions."""
    harness = trial.kit.harness("moe")
    prompts = random_prompts(3, (9, 4, 6))
    with Watch(harness.facts.tensor_device):
        for draw in DRAWS:
            harness.run(prompts, 3, chunk=8, score_prompts=True, sampling=draw)


def copies_are_ordered(trial: Trial) -> None:
    """Copy in, compute and copy out after slow device work, while the host writes the next values.
    Raises LawBroken if a result is not that of the values of its own round."""
    harness = trial.kit.harness("dense")
    runner = harness.started.built["runner"]
    buffer, block = runner.decode_registry.input_buffer("seq_lens"), runner.decode_registry.block
    readbacks = ReadbackQueue(runner.streams, torch.device(harness.facts.tensor_device), runner.staging_ring.pinned)
    waiting: list[tuple[int, Any]] = []
    with torch.inference_mode(), runner.streams.running():
        busy = torch.ones(BUSY, BUSY, device=harness.facts.tensor_device)
        for number in range(1, ROUNDS + 1):
            busy = busy @ busy / BUSY
            buffer.host[:] = number
            block.commit()
            waiting.append((number, readbacks.post([buffer.tensor + 1])))
            if len(waiting) == RING:
                _check_arrived(*waiting.pop(0))
        for sent in waiting:
            _check_arrived(*sent)


def _check_arrived(sent: int, readback: Any) -> None:
    found = np.unique(readback.read()[0]).tolist()
    if found != [sent + 1]:
        raise LawBroken(f"{sent} + 1 came back as {found}, wanted {sent + 1}: a copy was not ordered with its stream")


def kernels_reach_the_host(trial: Trial) -> None:
    """Copy rows that the host has just written to the device and back with the kernel `copy_rows`,
    after slow device work. Raises LawBroken unless the rows come back with what was added on the
    device."""
    harness = trial.kit.harness("dense")
    runner, device = harness.started.built["runner"], harness.facts.tensor_device
    copy_rows = harness.started.built["kernels"].copy_rows
    given, back = (torch.zeros(ROUNDS + 1, 24, pin_memory=harness.facts.has_pinned_memory) for _ in range(2))
    given.copy_(torch.arange(given.numel()).view_as(given))
    with torch.inference_mode(), runner.streams.running():
        busy = torch.ones(BUSY, BUSY, device=device)
        rows = torch.arange(1, ROUNDS + 1, dtype=torch.int32, device=device)
        loads, count = torch.stack((rows.flip(0), rows)).unsqueeze(1), rows[-1:]
        held = torch.zeros(ROUNDS + 1, 24, device=device)
        busy = busy @ busy / BUSY
        copy_rows(given, held, loads, count)
        copy_rows(held + busy[:1, :24], back, loads, count)
    if harness.facts.has_streams:
        torch.accelerator.synchronize(device)
    if not torch.equal(back[1:], given[1:] + 1):
        raise LawBroken(
            "rows of pinned memory differ after a copy to the device and back: kernels do not reach this memory"
        )


def lengths_are_on_the_host(trial: Trial) -> None:
    """Run decode steps and prompts (the case names an attention backend, or is empty). Raises
    LawBroken if lengths on the host differ from those on the device, or if a batch without them is
    not refused with ValueError."""
    harness = trial.kit.harness("dense", **({"attention_backend": trial.case} if trial.case else {}))
    for mode, rows in ((ForwardMode.DECODE, ((5, 1), (3, 1))), (ForwardMode.EXTEND, ((0, 4), (2, 3)))):
        _check_mirrors(harness, mode, rows)


def _check_mirrors(harness: Harness, mode: ForwardMode, rows: Rows) -> None:
    runner = copy(harness.started.built["runner"])
    contents = draw_contents(1, rows, harness)
    with torch.inference_mode():
        staged = runner.init_batch(schedule_batch(contents, mode, harness.limits.page_size))
        for spec in host_arrays(type(staged)):
            mirror, tensor = getattr(staged, spec.name), getattr(staged, spec.mirror)
            if tensor is not None and (mirror is None or mirror.tolist() != tensor.tolist()):
                raise LawBroken(f"{spec.name} of {mode.name} rows {rows} is {mirror}, on the device {tensor.tolist()}")
        staged.seq_lens_cpu = None
        try:
            runner.forward(staged)
        except ValueError:
            return
    raise LawBroken(f"{mode.name} rows {rows} ran without lengths on the host")


def _where(holds: Callable[[Facts], bool]) -> Callable[[Target], tuple[str, ...]]:
    """Return a function of a device that gives the law's only case if `holds` is True of its facts,
    and no case otherwise."""
    return lambda target: one_case(target) if holds(target.facts()) else ()


def _need_lengths(target: Target) -> tuple[str, ...]:
    """Return the law's cases: "" if the device needs lengths on the host, then the names of the
    usable attention backends that do; none if the device is not of the torch runtime."""
    if "torch_runtime" not in target.capabilities():
        return ()
    own = ("",) if target.facts().needs_host_lengths else ()
    return (*own, *(name for name, kind in target.usable_attention().items() if kind.facts.needs_host_lengths))


def _torch_law(name: str, says: str, check: Any, *mutants: Any, cases: Any = one_case, **more: Any) -> Law:
    given = {"mutants": mutants, "needs": TORCH, "interpreted": frozenset[str](), "cases": cases, **more}
    return Law(name=name, level="C2", says=says, check=check, **given)


LAWS: tuple[Law, ...] = (
    Law(
        name="computes_in",
        level="C1",
        says="In each type that the facts name, log-probabilities are the reference's to its precision.",
        check=computes_in,
        mutants=(broken.COARSE,),
        tolerance=LOGPROBS,
        cases=Target.computed_dtypes,
        interpreted=frozenset(),
    ),
    _torch_law(
        "integers_are_narrow",
        "Where indices have 32 bits, no operation on the device sees an integer of 64.",
        integers_are_narrow,
        broken.WIDENS_IDS,
        broken.SUMS_WIDE,
        cases=_where(lambda facts: facts.index_dtype == "int32"),
    ),
    _torch_law(
        "copies_are_ordered",
        "What the host writes arrives before the work that reads it, and what the device makes comes back whole.",
        copies_are_ordered,
        broken.LATE_COPIES,
    ),
    _torch_law(
        "kernels_reach_the_host",
        "Kernels read and write pinned memory by themselves, in the order of their stream.",
        kernels_reach_the_host,
        broken.READS_A_COPY,
        cases=_where(lambda facts: facts.reaches_pinned_memory or facts.shares_host_memory),
        interpreted=None,
    ),
    _torch_law(
        "lengths_are_on_the_host",
        "Where a forward must know its lengths on the host, every batch has them there.",
        lengths_are_on_the_host,
        broken.LOSES_LENGTHS,
        broken.OLD_LENGTHS,
        cases=_need_lengths,
    ),
)
