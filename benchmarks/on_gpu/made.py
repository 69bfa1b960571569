"""Models with random weights that are drawn on the device; only a configuration is written. A
weight's name is the seed, so the engine and its peer have the same weights."""

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
from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.conformance.mutant import wrap_steps
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.engine.core import Engine
from sglcore.engine.start import choose_overlap, embedded_model, no_progress
from sglcore.layers.build_scope import Weights
from sglcore.layers.torch_layers import Build
from sglcore.models.architecture_registry import model_class
from sglcore.models.implementation import choose_implementation
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.weight_packing import Packer
from sglcore.runtime.kernels.kernel_choice import Refusals
from sglcore.runtime.kernels.table import KernelTable

from .run import Run
from .sizes import Geometry

SPREAD = 0.02
PLAIN: Mapping[str, Any] = MappingProxyType({"speculative": "off"})
"""Default settings of every engine here: plain decode."""


def draw(name: str, target: Tensor) -> None:
    """Fill a weight with random values seeded by its checkpoint name; always the same on one kind
    of device."""
    generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(target.shape, generator=generator, device=target.device, dtype=torch.float32) * SPREAD
    target.copy_(drawn.add_(1) if "norm" in name else drawn)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A weight source that draws random values instead of reading a file."""

    name: str
    num_bytes: int
    form: None = None

    def copy(self, target: Tensor, report: Callable[[int], None]) -> None:
        """Draw it in its place."""
        draw(self.name, target)
        report(self.num_bytes)

    def stored(self, report: Callable[[int], None]) -> Any:
        """Raise TypeError: the weight has no packed form."""
        raise TypeError(f"{self.name!r} is plain")


def model(
    config: EngineConfig, facts: Facts, ledger: DecisionLedger, model_path: Path, kernels: KernelTable
) -> Architecture:
    """Replaces the bring-up step `model`: make the model of a folder without weights and draw its
    weights."""
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
    """Make a temporary checkpoint folder without weights."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(geometry.config(context)), encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_model() / name, folder / name)
        yield folder


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, the results and seconds of its bring-up steps, and its decisions by topic."""

    engine: Engine
    built: Mapping[str, Any]
    seconds: Mapping[str, float]
    ledger: Mapping[str, str]


@contextmanager
def opened(
    run: Run, geometry: Geometry, wrapped: Mapping[str, Callable[[Any], Any]] | None = None, **settings: Any
) -> Iterator[Opened]:
    """Open an engine with a drawn model and close it at the end of the block. `wrapped`: by bring-
    up step, a function that changes its result."""
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
    """Return the geometry with at most `layers` layers and a vocabulary of at most `vocab`."""
    return replace(geometry, layers=min(layers, geometry.layers), vocab=min(vocab, geometry.vocab))
