"""The driver's side of a runner: starts it, sends requests, stops it (SIGSTOP) while another is
measured, and ends it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import peak_bytes, send

HERE = Path(__file__).resolve().parent
UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "KMP_BLOCKTIME")


class ChildError(Exception):
    """A runner does not answer, or answers with an error; the table shows the text."""


class Child:
    """One engine in its own process, session and environment; stopped except during requests."""

    def __init__(self, python: Path, runner: str, job: Mapping[str, Any], log: Path) -> None:
        """Start it; `wait_ready` waits for it. Its error stream goes to `log`."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._begin = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(HERE / f"run_{runner}.py"), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._buffer = b""

    def wait_ready(self, timeout: float) -> tuple[float, int, Sequence[int]]:
        """Wait for its first token. Returns (seconds since the start of the process, peak bytes
        until then, first tokens of a fixed prompt). Raises ChildError."""
        self._read(timeout)
        seconds = time.perf_counter() - self._begin
        peak = peak_bytes(self._process.pid)
        tokens = self._read(timeout)["tokens"]
        self._hold()
        return seconds, peak, tokens

    def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Run one case; the child is stopped before and after. Waits; raises ChildError."""
        if self._process.poll() is not None:
            raise ChildError(f"ended with status {self._process.returncode}; see {self.log}")
        send(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            return self._read(timeout)
        except BrokenPipeError:
            raise ChildError(f"ended; see {self.log}") from None
        finally:
            self._hold()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """Its peak memory in bytes until now."""
        return peak_bytes(self._process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Kill all its processes. Idempotent."""
        if self._process.poll() is None:
            send(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue

    def _hold(self) -> None:
        if self._process.poll() is None:
            send(self._process.pid, signal.SIGSTOP)

    def _read(self, timeout: float) -> dict[str, Any]:
        """Return the next message. Raises ChildError if it is an error, if none comes in time, or
        if the child ends."""
        deadline = time.perf_counter() + timeout
        while b"\n" not in self._buffer:
            if not self._wait_readable(deadline - time.perf_counter()):
                self.close()
                raise ChildError(f"no answer within {timeout:.0f} s; see {self.log}")
            assert self._process.stdout is not None
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                self._process.wait()
                raise ChildError(f"ended with status {self._process.returncode}; see {self.log}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def _wait_readable(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            assert self._process.stdout is not None
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return bool(selector.select(max(seconds, 0.0)))
