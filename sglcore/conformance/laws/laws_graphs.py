"""Laws of level C2 (runner): the graphs of a device by themselves. A replay reads what the
captured buffers hold now, replays run in their order, and errors leave graphs usable."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken
from sglcore.conformance.mutant import Mutant
from sglcore.conformance.mutants import mutants_graphs as broken
from sglcore.conformance.target import Target
from sglcore.device.package import resolve
from sglcore.runtime.graphs.graph_backend import CapturedStep, GraphBackend
from sglcore.runtime.streams import Streams

SAID = "in the step"
MOST_RUNS = 2
"""Largest number of runs of a step during a capture: one to warm up, one to record."""


@contextmanager
def _mechanism(trial: Trial) -> Iterator[tuple[GraphBackend, Tensor, Tensor]]:
    """Yield a new graph backend of the kind that the case names, with two buffers of four zeros, on
    the stream that runs forwards. The backend is closed at the end."""
    harness, package = trial.kit.harness("dense"), trial.target.package
    streams: Streams = harness.started.built["streams"]
    backend: GraphBackend = resolve(package.graphs[trial.case], package.name)(harness.facts, streams)
    harness.settle()
    try:
        with torch.inference_mode(), streams.running():
            first, second = torch.zeros(2, 4, device=harness.facts.tensor_device)
            yield backend, first, second
    finally:
        backend.close()


def _check(what: str, found: Tensor, wanted: float) -> None:
    if found.tolist() != [wanted] * len(found):
        raise LawBroken(f"{what} gave {found.tolist()}, wanted {wanted:g} everywhere")


def replay_reads_buffers(trial: Trial) -> None:
    """Capture a step, then replay it with other values in its input buffer. Raises LawBroken if a
    replay does not use the values that the buffer has then."""
    with _mechanism(trial) as (backend, given, made):
        step = backend.capture(lambda: made.copy_(given * 2))
        for value in (1.0, 5.0):
            given.fill_(value)
            _check(f"a captured doubling of {value:g}", step.replay(None), 2 * value)


def replays_keep_order(trial: Trial) -> None:
    """Replay two captures that share a buffer in another order than they were captured. Raises
    LawBroken if one does not work on what the replay before it left."""
    with _mechanism(trial) as (backend, total, _):
        steps = [backend.capture(lambda: total.add_(1)), backend.capture(lambda: total.mul_(10))]
        total.zero_()
        for place in (0, 1, 0):
            steps[place].replay(None)
        _check("adding 1, multiplying by 10 and adding 1", total, 11.0)


def errors_leave_graphs_usable(trial: Trial) -> None:
    """Capture steps that raise, in the first run and in the second. Raises LawBroken if a capture
    raises something else than the step's error, or if the next capture does not work."""
    with _mechanism(trial) as (backend, total, made):
        for run in range(1, MOST_RUNS + 1):
            try:
                backend.capture(_fails_in(run, total))
            except Exception as error:
                _check_told(error, is_recorded=trial.target.facts().has_streams)
        step: CapturedStep = backend.capture(lambda: made.fill_(7))
        made.zero_()
        _check("a capture after one that failed", step.replay(None), 7.0)


def _fails_in(run: int, total: Tensor) -> Callable[[], Tensor]:
    """Return a step that adds 1 to `total` and raises LookupError when it is called for the
    `run`-th time."""
    left = [run]

    def step() -> Tensor:
        left[0] -= 1
        total.add_(1)
        if not left[0]:
            raise LookupError(SAID)
        return total

    return step


def _check_told(error: Exception, is_recorded: bool) -> None:
    """Raise LawBroken unless `error`, raised by a failed capture, is the step's own. Where nothing
    is recorded (`is_recorded` False), an error that quotes the step's will do, as a compiler raises
    it."""
    if SAID not in "".join(traceback.format_exception(error)) or (is_recorded and not isinstance(error, LookupError)):
        raise LawBroken(f"the step raised a LookupError, but its capture raised {error!r}") from error


def _kinds(target: Target) -> tuple[str, ...]:
    return tuple(target.package.graphs)


def _law(name: str, says: str, check: Callable[[Trial], None], mutant: Mutant) -> Law:
    return Law(
        name=name,
        level="C2",
        says=says,
        check=check,
        mutants=(mutant,),
        needs=frozenset({"torch_runtime", "graphs"}),
        cases=_kinds,
        interpreted=frozenset(),
    )


LAWS: tuple[Law, ...] = (
    _law(
        "replay_reads_buffers",
        "A replay works on what its buffers hold now.",
        replay_reads_buffers,
        broken.FIRST_OUTPUTS,
    ),
    _law(
        "replays_keep_order",
        "Captures that share memory run in the order of their replays.",
        replays_keep_order,
        broken.ONCE_EACH,
    ),
    _law(
        "errors_leave_graphs_usable",
        "What a step raises comes out of its capture, and the next capture is whole.",
        errors_leave_graphs_usable,
        broken.HIDES_ERRORS,
    ),
)
