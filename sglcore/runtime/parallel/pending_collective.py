"""A collective in progress, as a value: the holder may wait for it; no other state refers to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    from sglcore.runtime.overlap.interleave import Turn


class CollectiveError(RuntimeError):
    """A collective failed, usually because another rank has ended: a consequence, not a cause."""


class Handle(Protocol):
    """A launched collective; `wait` returns its result."""

    def wait(self) -> Tensor:
        """Return the result; can be called repeatedly.

        Lets the other micro-batch run first, if there is one. Raises CollectiveError.
        """
        ...

    def finish(self) -> Tensor:
        """Return the result as `wait` does, without letting the other micro-batch run."""
        ...


class Finished:
    """The `Handle` of a result that is already there."""

    __slots__ = ("_result",)

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        """Return the result at once; the other micro-batch does not run."""
        return self._result

    def finish(self) -> Tensor:
        """Return the result at once."""
        return self._result


class Launched:
    """The `Handle` of asynchronous work of a communication backend.

    Keeps inputs and output alive until the work is done, so that their memory is not reused before.
    """

    __slots__ = ("_held", "_result", "_size", "_turn", "_work")

    def __init__(self, work: dist.Work, turn: Turn, result: Tensor, held: Tensor, size: int) -> None:
        """`turn` belongs to the micro-batch that launched the work; `held` is the input, `size` the
        number of ranks.
        """
        self._work: dist.Work | None = work
        self._turn, self._result, self._held, self._size = turn, result, held, size

    def wait(self) -> Tensor:
        """Let the other micro-batch run, wait for the work and return its result. Later calls
        return the result at once. Raises CollectiveError if the work failed.
        """
        if self._work is not None:
            self._turn.pause()
        return self.finish()

    def finish(self) -> Tensor:
        """Wait for the work and return its result, without letting the other micro-batch run.
        Raises CollectiveError if the work failed.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except (RuntimeError, ValueError) as error:
                raise CollectiveError(f"a collective among {self._size} ranks failed: {error}") from error
            self._work, self._held = None, self._result
        return self._result


def wait_all(*handles: Handle) -> list[Tensor]:
    """Return the results of several handles launched in a row; the other micro-batch runs once."""
    return [handles[0].wait(), *(handle.finish() for handle in handles[1:])]
