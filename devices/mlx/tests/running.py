"""Starts a worker on the embedded model or another folder, as the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger
from sglcore.device.package import resolve
from sglcore.engine.start import embedded_model, no_progress
from sglcore_mlx import package


def bring_up(folder: Path | None = None, ledger: DecisionLedger | None = None, **settings: Any) -> Mapping[str, Any]:
    """Run the package's bring-up and return the result of each step. The caller closes the
    worker."""
    given = {
        "config": EngineConfig(**{"max_requests": 8, "device": "mlx", **settings}),
        "package": package,
        "facts": resolve(package.facts)(0),
        "ledger": ledger or DecisionLedger(),
        "progress": no_progress,
        "model_path": folder or embedded_model(),
    }
    return resolve(package.bring_up).run(given)


@contextmanager
def running(folder: Path | None = None, ledger: DecisionLedger | None = None, **settings: Any):
    """As `bring_up`, as a context manager that closes the worker."""
    built = bring_up(folder, ledger, **settings)
    try:
        yield built
    finally:
        built["worker"].close()
