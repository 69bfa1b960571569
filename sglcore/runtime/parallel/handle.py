"""A collective under way, as a value: whoever has it may wait for it, and nothing else knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    from sglcore.runtime.overlap.turns import Turn


class CollectiveError(RuntimeError):
    """A collective failed, most often because another rank has ended: a consequence, not a cause."""


class Handle(Protocol):
    """What was launched."""

    def wait(self) -> Tensor:
        """What came of it, of any number of calls; where two halves of a batch take turns, the other runs first. Raises
        CollectiveError."""
        ...

    def finish(self) -> Tensor:
        """The same, without letting the other run."""
        ...


class Finished:
    """Nobody is waited for."""

    __slots__ = ("_result",)

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """See `Handle`."""
        return self._result

    def finish(self) -> Tensor:
        """See `Handle`."""
        return self._result


class Launched:
    """A back end's work. It holds what is read and written until the work is done, so that neither is used again before."""

    __slots__ = ("_held", "_result", "_size", "_turn", "_work")

    def __init__(self, work: dist.Work, turn: Turn, result: Tensor, held: Tensor, size: int) -> None:
        """`turn` is that of the half which launched it, `held` what is read, and `size` how many ranks there are."""
        self._work: dist.Work | None = work
        self._turn, self._result, self._held, self._size = turn, result, held, size

    def wait(self) -> Tensor:
        """See `Handle`."""
        if self._work is not None:
            self._turn.pause()
        return self.finish()

    def finish(self) -> Tensor:
        """See `Handle`."""
        if self._work is not None:
            try:
                self._work.wait()
            except (RuntimeError, ValueError) as error:
                raise CollectiveError(f"a collective among {self._size} ranks failed: {error}") from error
            self._work, self._held = None, self._result
        return self._result


def wait_all(*handles: Handle) -> list[Tensor]:
    """What came of several, which were launched one after the other: the other half runs once."""
    return [handles[0].wait(), *(handle.finish() for handle in handles[1:])]
