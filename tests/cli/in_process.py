"""Runs `sglcore WORDS` in the test's process and returns its output and exit code, without the cost
of a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from sglcore.cli.__main__ import main


def run_here(words: tuple[str, ...], environ: Mapping[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command with this environment and standard input; waits for the end.

    Use it for output and results. Tests of start, signals and exit need a new process.
    """
    with TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(text)
        with mock.patch.dict(os.environ, environ), _standard_streams(streams):
            code = main(words)
        out, errors = (path.read_text() for path in streams[1:])
        return subprocess.CompletedProcess(list(words), code, out, errors)


@contextmanager
def _standard_streams(files: list[Path]) -> Iterator[None]:
    """Use these files as descriptors 0 to 2, for Python and for libraries; the old ones are
    restored."""
    before, kept = (sys.stdin, sys.stdout, sys.stderr), [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    opened = [open(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww")]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = opened
    try:
        yield
    finally:
        for stream in opened:
            stream.close()
        sys.stdin, sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
