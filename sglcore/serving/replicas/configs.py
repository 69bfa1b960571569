"""The configuration for all engines of one server: the model path is valid in any folder, and
settings that a measurement decides are decided once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from sglcore.config.engine_config import EngineConfig
from sglcore.engine.model_download import is_hub_name
from sglcore.serving.replicas.ipc import ModelInfo


def with_whole_path(config: EngineConfig) -> EngineConfig:
    """Return the configuration with an absolute model path: an engine may be started in another
    folder. Unchanged without a model, and for the name of a model on the hub."""
    if config.model is None or is_hub_name(config.model):
        return config
    return replace(config, model=str(Path(config.model).expanduser().absolute()))


def is_open(config: EngineConfig) -> bool:
    """Return whether `speculative` is "auto": the first engine decides it by a measurement at its
    start, and the other engines are started after it."""
    return config.speculative == "auto"


def decided(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return the configuration with `speculative` set to the kind, or "off", that the engine `info`
    chose by its measurement, as its ledger says. Unchanged if `is_open` is false for the
    configuration, or if the ledger has no such row."""
    found = next((row["effective"] for row in reversed(info.ledger) if row["topic"] == "speculative"), None)
    if not is_open(config) or found is None:
        return config
    return replace(config, speculative=re.split("[,;]", found)[0])
