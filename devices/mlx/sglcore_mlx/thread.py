"""The thread that queues all work: MLX binds streams to threads, and on the CPU queueing waits for
execution."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class StreamThread:
    """A daemon thread that runs calls one after the other, in the order in which they were posted.
    Making the object starts it. Each of its users closes it; the last one ends it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="sglcore-mlx", daemon=True)
        self._closed, self._users = False, 1
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether calls can be posted: it is not closed, and this process is not a fork, which has
        no copy of the thread."""
        return not self._closed and self._thread.is_alive()

    def post(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call and return its future without waiting; the call's exceptions go to the
        future. Raises RuntimeError if the thread is not running."""
        if not self.is_running:
            raise RuntimeError("the stream's thread is closed, or this is a fork of its process; start in each process")
        future: Future[R] = Future()
        self._jobs.put((future, call, args, kwargs))
        return future

    def call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the thread and wait for its result; its exceptions are raised here. Raises
        RuntimeError if the thread is not running. Must not be called on the thread itself."""
        return self.post(call, *args, **kwargs).result()

    def share(self) -> Self:
        """Add a user, and return this thread."""
        self._users += 1
        return self

    @property
    def has_ended(self) -> bool:
        """Whether the last user has closed it."""
        return self._closed

    def close(self) -> None:
        """For the last user: finish all posted calls and end the thread; waits. Further calls do
        nothing."""
        self._users -= 1
        if self._users <= 0 and self.is_running:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    """Run jobs until None comes. Exceptions go to the job's future; the frame keeps no reference to
    an ended call."""
    while (job := jobs.get()) is not None:
        future, call, args, kwargs = job
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        del job, future, call, args, kwargs
