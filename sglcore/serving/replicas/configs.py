"""The configuration that all engines of one server are given: a model that means the same in any
folder, and decided once what is decided by a measurement, which each would make for itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from sglcore.device.config import EngineConfig
from sglcore.engine.hub import is_hub_name
from sglcore.serving.replicas.ipc import ModelInfo


def with_whole_path(config: EngineConfig) -> EngineConfig:
    """An engine may be started in another folder."""
    if config.model is None or is_hub_name(config.model):
        return config
    return replace(config, model=str(Path(config.model).expanduser().absolute()))


def is_open(config: EngineConfig) -> bool:
    """The first engine decides something by a measurement, so others wait for it."""
    return config.speculative == "auto"


def decided(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """The same, as the engine `info` has decided it."""
    found = next((row["effective"] for row in reversed(info.ledger) if row["topic"] == "speculative"), None)
    if not is_open(config) or found is None:
        return config
    return replace(config, speculative=re.split("[,;]", found)[0])
