"""Progress bars for loading, capturing and generating, on standard error.

Nothing is drawn if that is not a terminal.
"""

from __future__ import annotations

from types import TracebackType


class Progress:
    """Context manager that draws progress bars on standard error, one per phase; its method `phase`
    is a progress callback. Nothing is drawn with `enabled=False`."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bars: object | None = None
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Progress:
        return self

    def _start(self) -> object:
        """Start and return the bars. Called at the first phase, so that an error before it is the
        first thing on the screen."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bars = Bars(*columns, console=Console(stderr=True), transient=True)
        bars.start()
        return bars

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()  # pyright: ignore[reportAttributeAccessIssue]
        self._bars = None
        self._tasks.clear()

    def phase(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of phase `name` are complete. The first call for a name
        adds its bar."""
        if not self._enabled:
            return
        if self._bars is None:
            self._bars = self._start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)  # pyright: ignore[reportAttributeAccessIssue]
        self._bars.update(self._tasks[name], completed=done, total=total)  # pyright: ignore[reportAttributeAccessIssue]
