"""A test engine with a group of ranks as its worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.session import Session
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.watch import Patience
from sglcore.engine.start import start
from sglcore.schedule.make_loop import make_loop
from tests.laws import engine
from tests.laws.engine import TokenEngine, random_prompts
from tests.parallel.forked import Defect, Forking


def configured(folder: Path, **settings: Any) -> EngineConfig:
    """Return a small configuration in float32 on two ranks of the lane's device."""
    return engine.configured(folder, **{"tp": 2, **settings})


class RankedEngine(TokenEngine):
    """A scheduler and ranks over a checkpoint, without text; a context manager that ends its
    ranks."""

    def __init__(
        self,
        folder: Path,
        defect: Defect | None = None,
        patience: Patience = Patience(silence=60.0),
        method: str = "forkserver",
        **settings: Any,
    ) -> None:
        config = configured(folder, **settings)
        self.forking = Forking(defect, method=method)
        self.started = start(config, ranks=RankOptions(self.forking, patience))
        self.worker: Any = self.started.worker
        recorder = RecordingWorker(self.worker)
        made: Any = make_loop(
            recorder, config.dp, overlap=config.overlap is not False, prefix_cache=config.prefix_cache
        )
        Session.__init__(self, recorder, *made)

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.close()


def lead_and_die(folder: Path, pipe: Any) -> None:
    """Run a leader that is killed while its ranks run; their pids go to `pipe`."""
    ranked = RankedEngine(folder, method="fork")
    ranked.run(random_prompts(1, (5,)), 2)
    pipe.send(ranked.worker.pids)
    os.kill(os.getpid(), signal.SIGKILL)
