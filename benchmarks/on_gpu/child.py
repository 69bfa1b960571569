"""The process of one part: it imports, waits for its turn, and reports results as JSON lines.
Standard library only."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from queue import Queue
from typing import Any, TextIO

from .parts import Part


class Report:
    """Writes the messages of a part, one JSON line each, at once. Thread-safe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def row(self, **values: Any) -> None:
        """Report a measurement."""
        self._say({"rows": values})

    def skip(self, what: str, why: str) -> None:
        """Report something that this device or machine does not have."""
        self._say({"skipped": {"what": what, "why": why}})

    def note(self, **values: Any) -> None:
        """Report named values about the part as a whole."""
        self._say(values)

    def ready(self) -> None:
        """Report that imports are done and the part can have the device."""
        self._say({"ready": True})

    def end(self, verdict: str, reason: str = "") -> None:
        """Report the verdict; the last line."""
        self._say({"end": verdict, "reason": reason})

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()


class PartFailed(Exception):
    """The part found an error; its text is the reason."""


def serve(part: Part, imports: Sequence[str], run: Callable[[Part, Report, Mapping[str, Any]], None]) -> None:
    """Run a part's process: import these modules, wait for the device, then call `run`; never
    returns. Libraries that print write to the error stream, and code that reads standard input
    (pytest does) gets an empty one. Ends the process when its parent ends."""
    report, asked = Report(os.fdopen(os.dup(1), "w", encoding="utf-8")), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    turns: Queue[str] = Queue()
    threading.Thread(target=_listen, args=(asked, turns), daemon=True).start()
    try:
        for name in (*imports, part.function.partition(":")[0]):
            import_module(name, __package__)
        report.ready()
        run(part, report, json.loads(turns.get()))
    except BaseException as error:
        traceback.print_exc()
        report.end("failed", _reason(error))
        os._exit(1)
    report.end("passed")
    os._exit(0)  # threads of compilers or of the device may still run


def call(part: Part, *args: Any) -> None:
    """Call the part's function."""
    module, _, name = part.function.partition(":")
    getattr(import_module(module, __package__), name)(*args)


def _reason(error: BaseException) -> str:
    if isinstance(error, PartFailed):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "on_gpu" in frame.filename] or list(frames)
    return f"{own[-1].filename.rpartition(os.sep)[2]}:{own[-1].lineno}: {type(error).__name__}: {error}"[:2000]


def _listen(asked: TextIO, turns: Queue[str]) -> None:
    turns.put(asked.readline() or _gone())
    asked.read()  # returns when the parent ends
    _gone()


def _gone() -> str:
    """End this process, because its parent has ended."""
    os._exit(3)
