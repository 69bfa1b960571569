"""A test engine with a group of ranks as its worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.watch import Patience
from sglcore.engine.start import start
from sglcore.schedule.make_loop import make_loop
from tests.laws.engine import TokenEngine, Watched, environ, random_prompts
from tests.parallel.forked import Defect, Forking


def configured(folder: Path, **settings: Any) -> EngineConfig:
    """A small configuration in float32 on the lane's device."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "max_requests": 6,
        "page_size": 4,
        "kv_cache_memory": 8 << 20,
        "max_batch_tokens": 128,
        "tp": 2,
        "device": os.environ["LANE_DEVICE"],
    }
    return resolve_config({**defaults, **settings, "model": str(folder)}, environ())


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
        self.watched: Any = Watched(self.worker)
        self.paths = self.watched.paths
        made: Any = make_loop(
            self.watched, config.dp, overlap=config.overlap is not False, prefix_cache=config.prefix_cache
        )
        self.scheduler, self.loop = made
        self._count = 0

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.close()


def lead_and_die(folder: Path, pipe: Any) -> None:
    """Run a leader that is killed while its ranks run; their pids go to `pipe`."""
    engine = RankedEngine(folder, method="fork")
    engine.run(random_prompts(1, (5,)), 2)
    pipe.send(engine.worker.pids)
    os.kill(os.getpid(), signal.SIGKILL)
