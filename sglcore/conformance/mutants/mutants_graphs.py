"""Broken graph backends, which replace a device's own of every kind. The docstring of a class is
the text of its `Mutant`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sglcore.conformance.mutant import Mutant
from sglcore.conformance.reference_parts import ReplayedGraphs, ReplayedStep
from sglcore.device.package import DevicePackage

HERE = "sglcore.conformance.mutants.mutants_graphs"


class FirstOutputs(ReplayedGraphs):
    """Replays return the results of the capture."""

    def capture(self, step: Callable[[], Tensor]) -> ReplayedStep:
        """Run the step; each replay returns a copy of this run's output."""
        output = step().clone()
        return ReplayedStep(lambda: output)


class OnceEach(ReplayedGraphs):
    """A step that ran is not run again."""

    def capture(self, step: Callable[[], Tensor]) -> ReplayedStep:
        """Run the step; the first replay runs it once more, and all further replays return what
        that run returned.
        """
        step()
        ran: list[Tensor] = []

        def once() -> Tensor:
            if not ran:
                ran.append(step())
            return ran[0]

        return ReplayedStep(once)


class HidesErrors(ReplayedGraphs):
    """A failed capture does not report the reason."""

    def capture(self, step: Callable[[], Tensor]) -> ReplayedStep:
        """Capture the step, but raise RuntimeError in place of the LookupError that the step
        raises."""
        try:
            return super().capture(step)
        except LookupError:
            raise RuntimeError("the capture was invalidated") from None


def _graphs(name: str, kind: type[ReplayedGraphs]) -> Mutant:
    def planted(package: DevicePackage) -> DevicePackage:
        return replace(package, graphs=dict.fromkeys(package.graphs, f"{HERE}:{kind.__name__}"))

    return Mutant(name=name, says=str(kind.__doc__), package=planted, needs=frozenset({"torch_runtime", "graphs"}))


FIRST_OUTPUTS = _graphs("first outputs", FirstOutputs)
ONCE_EACH = _graphs("once each", OnceEach)
HIDES_ERRORS = _graphs("hides errors", HidesErrors)
