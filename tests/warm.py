"""Runs `python WORDS` in a new process without importing torch and pytest again: it is forked from
a process that has them."""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

PRELOADED = ("torch", "numpy", "pytest", "rich", "typer", "tokenizers", "safetensors", "regex", "jinja2")
"""Third-party modules only: each process imports sglcore's modules itself, with all their
effects."""


def run(
    words: Sequence[str], cwd: Path, environ: Mapping[str, str], text: str = "", timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` or `python -c CODE ...` with this environment and standard input;
    waits for the end. Raises TimeoutExpired.

    For tests of what a process does. Tests of how a process starts and what it imports need a real
    start.
    """
    with TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(text)
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        process = context.Process(target=_become, args=(tuple(words), cwd, dict(environ), streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(words), timeout)
        out, errors = (path.read_text() for path in streams[1:])
        return subprocess.CompletedProcess(list(words), process.exitcode, out, errors)


def _become(words: Sequence[str], cwd: Path, environ: Mapping[str, str], streams: Sequence[Path]) -> None:
    """Act as the process that the interpreter makes from these words."""
    gc.freeze()
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # the fork server's standard input is empty
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [str(cwd), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    kind, what, *rest = words
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
