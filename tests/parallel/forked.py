"""Ranks whose processes are forked from one that has imported torch and the runtime: a start of
each costs a fiftieth."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from sglcore.engine.ranks.spec import RankProcess, RankSpec

PRELOADED = (
    "torch",
    "torch.distributed",
    "numpy",
    "pytest",
    "rich",
    "typer",
    "tokenizers",
    "safetensors",
    "regex",
    "jinja2",
    "sglcore.runtime.bring_up",
    "sglcore.runtime.parallel.decided",
    "sglcore.models.checkpoint",
    "sglcore.engine.ranks.rank_process",
    "tests.parallel.defects",
    "tests.parallel.dispatch_defects",
    "tests.parallel.topologies",
)
Defect = Callable[[int], None]
"""Called in the process of a rank, with its number, before it starts."""


def forking(method: str = "forkserver") -> Any:
    """Of processes that need not import what all of them do; "fork": of one that has itself, and
    has no threads."""
    context: Any = get_context(method)
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Forked:
    """A forked process as a supervisor of ranks sees it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Forking:
    """Starts ranks, each with the same defect if there is one; `processes` are all that it has
    started."""

    defect: Defect | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    method: str = "forkserver"
    processes: list[Forked] = field(default_factory=list)

    def __call__(self, spec: RankSpec) -> RankProcess:
        context = forking(self.method)
        process = context.Process(target=_become, args=(spec, self.defect, {**os.environ, **self.environ}))
        process.start()
        self.processes.append(Forked(process))
        return self.processes[-1]


def _become(spec: RankSpec, defect: Defect | None, environ: dict[str, str]) -> None:
    """Be the process of a rank."""
    from sglcore.engine.ranks import rank_process

    gc.freeze()
    os.environ.clear()
    os.environ.update(environ)
    if defect is not None:
        defect(spec.place["rank"])
    sys.exit(rank_process.run(spec))
