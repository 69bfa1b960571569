"""The process of one part: it imports, waits for its turn, and says what it finds as lines of JSON.
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
    """What a part says of itself, line by line, as soon as it is known."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def row(self, **values: Any) -> None:
        """Something that was measured."""
        self._say({"rows": values})

    def skip(self, what: str, why: str) -> None:
        """Something that this device, or this machine, does not have."""
        self._say({"skipped": {"what": what, "why": why}})

    def note(self, **values: Any) -> None:
        """Something about the part as a whole, by a name of its own."""
        self._say(values)

    def ready(self) -> None:
        """All is imported: the device may be given."""
        self._say({"ready": True})

    def end(self, verdict: str, reason: str = "") -> None:
        """The last line."""
        self._say({"end": verdict, "reason": reason})

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()


class PartFailed(Exception):
    """What a part found is wrong; its text is the reason."""


def serve(part: Part, imports: Sequence[str], run: Callable[[Part, Report, Mapping[str, Any]], None]) -> None:
    """Be the process of a part: import these modules, wait for the device, then `run`. What a
    library prints goes to the error stream, and who takes the standard input (pytest does) takes an
    empty one. Ends the process when the one that started it ends."""
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
    os._exit(0)  # threads of compilers and of the device may be there


def call(part: Part, *args: Any) -> None:
    """The part's own function."""
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
    asked.read()  # until whoever started this has ended
    _gone()


def _gone() -> str:
    """Whoever started this has ended."""
    os._exit(3)
