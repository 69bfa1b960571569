"""Runs each part in its own process and writes its messages to one file as they come. Standard
library only.

While one part measures, the process of the next part starts, imports its modules without touching
the device, and waits for its turn. A part that overruns, raises or hangs the device costs only its
own seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from .parts import Part

LEAST = 3.0
"""A part begins only if this number of seconds is left, or its own limit if that is less."""
START = 120.0
"""Limit in seconds for the imports of a process."""
TAIL = 1500
"""How many last characters of a failed part's error stream are kept."""


class Results:
    """The result file, rewritten after every row, so that measurements survive the end of this
    process."""

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        self.file = file
        self.content: dict[str, Any] = {**about, "parts": {}}
        file.parent.mkdir(parents=True, exist_ok=True)
        self.flush()

    def flush(self) -> None:
        """Write the content to a new file and replace the old one atomically."""
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)

    def begin(self, part: Part) -> dict[str, Any]:
        """Add and return the entry of a part that begins."""
        entry = self.content["parts"][part.name] = {"verdict": "running", "reason": "", "rows": [], "skipped": []}
        self.flush()
        return entry

    def but(self, name: str) -> dict[str, Any]:
        """Return the entries of all parts except one."""
        return {other: entry for other, entry in self.content["parts"].items() if other != name}


class Child:
    """The process of one part. It ends when this process ends, because its standard input closes.
    `until`: deadline for its messages, in monotonic seconds."""

    def __init__(self, part: Part, command: Sequence[str], log: Path) -> None:
        self.part, self.log, self.until = part, log, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                (*command, "--child", part.name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._said: Queue[str | None] = Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_pump, args=(self._process.stdout, self._said), daemon=True).start()

    def begin(self, earlier: Mapping[str, Any]) -> None:
        """Give it the device and the results of the earlier parts."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(earlier) + "\n")
            self._process.stdin.flush()

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield its messages until it ends. Waits; raises TimeoutError at `until`."""
        while True:
            try:
                line = self._said.get(timeout=max(self.until - time.monotonic(), 0.0))
            except Empty:
                raise TimeoutError from None
            if line is None:
                return
            yield json.loads(line)

    def end(self) -> int:
        """Kill its process group if it still runs; returns its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        return self._process.wait()

    def tail(self) -> str:
        """Return the end of its error stream."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()


def supervise(
    parts: Sequence[Part],
    command: Sequence[str],
    results: Results,
    seconds: float,
    *,
    goes_on: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Run parts one after the other, `seconds` in total at most; `command --child NAME` starts a
    part's process. Returns whether all passed. `goes_on`: continue after a failed part that would
    stop the others."""
    end, failed = time.monotonic() + seconds, False
    ahead: Child | None = None
    for place, part in enumerate(parts):
        child = ahead or _start(part, command, results)
        following = parts[place + 1 : place + 2]
        ahead = _start(following[0], command, results) if following else None
        verdict = _run(child, results, end)
        say(_line(part, results.content["parts"][part.name]))
        failed |= verdict != "passed"
        if part.stops and verdict != "passed" and not goes_on:
            say(f"{part.name} {verdict}: nothing else is measured; --go-on measures it all the same")
            break
    if ahead is not None:
        ahead.end()
    return not failed


def _start(part: Part, command: Sequence[str], results: Results) -> Child:
    return Child(part, command, results.file.with_suffix(f".{part.name}.log"))


def _run(child: Child, results: Results, end: float) -> str:
    """Give a part its turn and keep its messages; returns the verdict."""
    part, entry, begin = child.part, results.begin(child.part), time.monotonic()
    left = max(end - begin, 0.0)
    if left < min(LEAST, part.seconds):
        child.end()
        return _finish(results, entry, begin, "left out", f"{left:.0f} seconds were left of all")
    verdict, reason = _listen(child, results, entry, min(part.seconds, left))
    code = child.end()
    if verdict == "failed" and not reason:
        reason = f"its process ended with {code}: {child.tail()}"
    return _finish(results, entry, begin, verdict, reason)


def _listen(child: Child, results: Results, entry: dict[str, Any], limit: float) -> tuple[str, str]:
    """Keep a part's messages until it ends or reaches its limit; returns the verdict and the reason
    if known."""
    child.until, what = time.monotonic() + START, f"it was not ready after {START:.0f} seconds"
    try:
        for message in child.messages():
            if "ready" in message:
                child.until, what = time.monotonic() + limit, f"it was ended after {limit:g} seconds"
                child.begin(results.but(child.part.name))
            elif "end" in message:
                return message["end"], message["reason"]
            else:
                _keep(results, entry, message)
    except TimeoutError:
        return "overran", what
    return "failed", ""


def _keep(results: Results, entry: dict[str, Any], message: Mapping[str, Any]) -> None:
    for key, value in message.items():
        if isinstance(entry.get(key), list):
            entry[key].append(value)
        else:
            entry[key] = value
    results.flush()


def _finish(results: Results, entry: dict[str, Any], begin: float, verdict: str, reason: str) -> str:
    entry |= {"verdict": verdict, "reason": reason, "seconds": round(time.monotonic() - begin, 1)}
    results.flush()
    return verdict


def _line(part: Part, entry: Mapping[str, Any]) -> str:
    counts = (
        f"{len(entry['rows'])} rows, {len(entry['skipped'])} skipped, {entry['seconds']:.0f} of {part.seconds:.0f} s"
    )
    reason = f": {entry['reason'].splitlines()[-1]}" if entry["reason"] else ""
    return f"{part.name:<14} {entry['verdict']:<8} {counts}{reason}"


def _pump(stream: IO[str], said: Queue[str | None]) -> None:
    with suppress(ValueError):  # closed
        for line in stream:
            said.put(line)
    said.put(None)
