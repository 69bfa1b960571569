"""Models of random weights that are drawn on the device: nothing is written but a configuration,
and whoever draws a weight of a name on this device draws the same."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.checkpoint.dtype import choose_dtype
from sglcore.conformance.mutant import wrap_steps
from sglcore.device.bring_up import BringUp
from sglcore.device.config import EngineConfig, resolve_config
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger
from sglcore.device.package import resolve
from sglcore.engine.core import Engine
from sglcore.engine.start import choose_overlap, embedded_model, no_progress
from sglcore.layers.build import Build
from sglcore.layers.scope import Weights
from sglcore.models.build import Architecture
from sglcore.models.implementation import choose_implementation
from sglcore.models.packing import Packer
from sglcore.models.registry import model_class
from sglcore.runtime.kernels.choice import Refusals
from sglcore.runtime.kernels.table import KernelTable

from .run import Run
from .sizes import Geometry

SPREAD = 0.02
PLAIN: Mapping[str, Any] = MappingProxyType({"speculative": "off"})
"""Of every engine, unless a setting says otherwise: plain decode steps."""


def draw(name: str, target: Tensor) -> None:
    """Fill a weight of a checkpoint's name: always the same on a device."""
    generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(target.shape, generator=generator, device=target.device, dtype=torch.float32) * SPREAD
    target.copy_(drawn.add_(1) if "norm" in name else drawn)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where a weight comes from: nowhere."""

    name: str
    num_bytes: int
    form: None = None

    def copy(self, target: Tensor, report: Callable[[int], None]) -> None:
        """Draw it in its place."""
        draw(self.name, target)
        report(self.num_bytes)

    def stored(self, report: Callable[[int], None]) -> Any:
        """There is nothing but values."""
        raise TypeError(f"{self.name!r} is plain")


def model(
    config: EngineConfig, facts: Facts, ledger: DecisionLedger, model_path: Path, kernels: KernelTable
) -> Architecture:
    """In the place of the bring-up's step of this name: the model of a folder without weights."""
    model_config, architectures = choose_implementation("native", model_path, ledger)
    dtype = choose_dtype(config.dtype, model_config.dtype, facts)
    weights = Weights(getattr(torch, dtype.effective), torch.device(facts.tensor_device))
    positions, cells = config.max_model_len or model_config.context_length, getattr(torch, facts.index_dtype)
    build = Build(model_config, kernels, weights, positions, cells, Refusals(), config.kv_cache_dtype, 1, False)
    made: Architecture = model_class(model_config.architecture, architectures)(build)
    made.kernels = kernels
    with torch.no_grad():
        sources = {name: Drawn(name, target.nbytes) for name, target in weights.targets.items()}
        Packer(weights, kernels).load(sources, lambda size: None)
    return made


@contextmanager
def folder_of(geometry: Geometry, context: int) -> Iterator[Path]:
    """A checkpoint's folder without its weights."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(geometry.config(context)), encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_model() / name, folder / name)
        yield folder


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, what its bring-up built, by step, in how many seconds, and what was decided."""

    engine: Engine
    built: Mapping[str, Any]
    seconds: Mapping[str, float]
    ledger: Mapping[str, str]


@contextmanager
def opened(
    run: Run, geometry: Geometry, wrapped: Mapping[str, Callable[[Any], Any]] | None = None, **settings: Any
) -> Iterator[Opened]:
    """An engine with a model that is drawn; `wrapped` change what steps of the bring-up build.
    Closes it."""
    context = settings.setdefault("max_model_len", run.sizes.context)
    with folder_of(geometry, context) as folder:
        config = resolve_config(
            {**PLAIN, "model": str(folder), "device": run.config.device, **run.settings, **settings}
        )
        ledger, seconds = DecisionLedger(), dict[str, float]()
        order: BringUp = resolve(run.package.bring_up, run.package.name)
        order = wrap_steps(order.replace("model", model), wrapped or {})
        values = {"config": config, "package": run.package, "facts": run.facts, "ledger": ledger}
        built = order.run({**values, "progress": no_progress, "model_path": folder}, report=seconds.__setitem__)
        worker = built["worker"]
        try:
            overlap, row = choose_overlap(config, worker.limits)
            ledger.record(row)
            told = {row.topic: f"{row.effective}: {row.reason}" for row in ledger.rows}
            yield Opened(Engine(worker, folder, overlap=overlap, prefix_cache=False), built, seconds, told)
        finally:
            worker.close()


def smaller(geometry: Geometry, layers: int, vocab: int) -> Geometry:
    """The same layers, fewer of them, with fewer tokens to know."""
    return replace(geometry, layers=min(layers, geometry.layers), vocab=min(vocab, geometry.vocab))
