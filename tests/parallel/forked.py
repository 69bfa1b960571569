"""Ranks forked from a process that has already imported torch and the runtime: a start takes a
fiftieth of the time."""

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
    "sglcore.runtime.parallel.rank_decided_sampling",
    "sglcore.models.checkpoint",
    "sglcore.engine.ranks.rank_process",
    "tests.parallel.defects",
    "tests.parallel.dispatch_defects",
    "tests.parallel.topologies",
)
Defect = Callable[[int], None]
"""Called with the rank's number in its process, before it starts."""


def forking(method: str = "forkserver") -> Any:
    """The context for forked processes. "forkserver": from a server that has imported the common
    modules; "fork": from this process, which must not have threads."""
    context: Any = get_context(method)
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Forked:
    """A forked process with the interface that the supervisor of ranks uses."""

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
    """Starts ranks, each with the same defect if given; `processes`: all processes started."""

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
    """Run as the process of a rank."""
    from sglcore.engine.ranks import rank_process

    gc.freeze()
    os.environ.clear()
    os.environ.update(environ)
    if defect is not None:
        defect(spec.place["rank"])
    sys.exit(rank_process.run(spec))
