"""The device under test: its package, the folder of its files, its capabilities, and how it starts
on one of the kit's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.fixture import FILE, Fixture, read_fixture
from sglcore.conformance.mutant import Mutant, wrap_steps
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up import BringUp
from sglcore.device.candidate import run_probe
from sglcore.device.choice import Requested
from sglcore.device.discovery import GROUP, discover
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.selection import find_installed
from sglcore.worker.model_worker import ModelWorker

if TYPE_CHECKING:
    from sglcore.runtime.memory.pools import PoolKind, TokenToKVPool

GIVEN = ("config", "package", "facts", "ledger", "progress", "model_path")
"""Values that an engine gives to a bring-up."""

HEAD_DIMS = (16, 32, 64, 128, 256)
PAGE_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")
TORCH_STEPS = frozenset({"kernels", "pools", "attention", "runner"})
"""Steps of the bring-up of a device on the torch runtime; some laws inspect what they build."""


TRITON_ATTENTION = "sglcore.runtime.attention.triton"
TRITON_KERNELS = "sglcore.runtime.kernels.triton"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes with which a model of the kit runs: elements of a head, tokens of a page, and the
    dtype's name. `Target.geometry` chooses them so that a backend takes them."""

    head_dim: int
    page_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class StartedDevice:
    """A started device: its worker, what its bring-up built, by step name, and the ledger of its
    decisions."""

    worker: ModelWorker
    built: Mapping[str, Any]
    ledger: DecisionLedger


@dataclass(frozen=True, slots=True)
class Target:
    """A device under test. `distribution` and `version` are those of its package. `folder` holds
    the package's `gaps.toml`, `conformance.toml` and `bring_up.txt`; None: it has no folder.
    `mutant`: the planted defect; None: there is none."""

    package: DevicePackage
    distribution: str = ""
    version: str = ""
    folder: Path | None = None
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        """The device's name, as `--device` takes it."""
        return self.package.name

    def broken_by(self, mutant: Mutant) -> Target:
        """Return the same device with `mutant` planted in its declaration, facts and bring-up."""
        return replace(self, package=mutant.package(self.package), mutant=mutant)

    def facts(self) -> Facts:
        """Return the facts of the device with index 0, with the mutant's change. Imports the
        package's facts; raises what they raise."""
        found: Facts = resolve(self.package.facts, self.name)(0)
        return found if self.mutant is None else self.mutant.facts(found)

    def order(self) -> BringUp:
        """Return the device's bring-up, with the mutant's changes of order and steps. Runs no
        step."""
        order: BringUp = resolve(self.package.bring_up, self.name)
        if self.mutant is None:
            return order
        changed = self.mutant.order(order) if self.mutant.order is not None else order
        return wrap_steps(changed, self.mutant.steps)

    def fixture(self) -> Fixture:
        """Return the content of the package's `conformance.toml`; empty if there is none. Raises
        ConfigError for invalid content."""
        return read_fixture(self.folder)

    def pool(self, started: StartedDevice) -> TokenToKVPool | None:
        """Return access to the KV pool of a started device; None if the kit has none."""
        if (cells := self.fixture().cells) is not None:
            from sglcore.conformance.host_cells import HostPool  # It needs torch, which not every device's tests have.

            return HostPool(resolve(cells, self.name)(started.built))
        return started.built["pools"].token_to_kv if "torch_runtime" in self.capabilities() else None

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities that it has, of those that laws may need: "torch_runtime", "rows"
        (cache entries other than keys and values), "slices" (prompts in slices of layers), "cells",
        "attention", "graphs", "streams", "mixed_batches", "proposals"."""
        facts = self.facts()
        steps = {step.provides for step in self.order().steps}
        is_torch = steps >= TORCH_STEPS
        offered = {
            "torch_runtime": is_torch,
            "rows": is_torch or bool(self.fixture().models),
            "slices": is_torch or "slices" in steps,
            "cells": is_torch or self.fixture().cells is not None,
            "attention": bool(self.package.attention),
            "graphs": bool(self.package.graphs),
            "streams": facts.has_streams,
            "mixed_batches": facts.allows_mixed_batches,
            "proposals": "speculation" in steps,
        }
        return frozenset(name for name, holds in offered.items() if holds)

    def has_triton_kernels(self) -> bool:
        """Return whether its preferred kernel table uses the core's Triton kernels. Raises what
        making the table raises."""
        origin = self.make_kernels(next(iter(self.package.kernels))).origin
        return any(function.startswith(TRITON_KERNELS) for function in origin.values())

    def make_kernels(self, name: str) -> Any:
        """Return a new kernel table, the one that the package has under `name`. Raises what making
        it raises."""
        return resolve(self.package.kernels[name], self.name)()

    def attention_without_triton(self, dtype: str) -> Mapping[str, str]:
        """Return the setting (`attention_backend`) that names the first usable backend that takes a
        dtype and is not the core's Triton attention, if Triton attention is the first to take it;
        {} if another one is first, or if there is none else."""
        takes = [
            (name, any(TRITON_ATTENTION in item.__module__ for item in kind.__mro__))
            for name, kind in self.usable_attention().items()
            if kind.facts.dtypes is None or dtype in kind.facts.dtypes
        ]
        other = next((name for name, is_triton in takes if not is_triton), "")
        return {"attention_backend": other} if takes and takes[0][1] and other else {}

    def importable_attention(self) -> Mapping[str, Any]:
        """Return the attention backend classes with their libraries installed, by name, in order of
        preference."""
        found: dict[str, Any] = {}
        for name, ref in self.package.attention.items():
            try:
                found[name] = resolve(ref, self.name)
            except ImportError:
                continue
        return MappingProxyType(found)

    def usable_attention(self) -> Mapping[str, Any]:
        """Return the importable backend classes by name, in order of preference, without those that
        report themselves unavailable on the current device, and those that read no keys and values
        of heads: the models of these laws have such. All of them on a device that is not of the
        torch runtime, or if there is no device to ask."""
        found = self.importable_attention()
        if "torch_runtime" not in self.capabilities():
            return found
        return MappingProxyType(
            {name: kind for name, kind in found.items() if reads_heads(kind) and not _refuses(kind)}
        )

    def geometry(self, backend: str | None = None) -> Geometry:
        """Return sizes that a backend takes, in a dtype that the device computes in. Without a
        named backend: the preferred usable one, in float32 if a backend computes in it with these
        sizes, because laws are strict in float32. Without usable backends: the smallest heads and
        the facts' own page size. Raises KeyError for a backend that is not in `usable_attention`.
        """
        classes, own = self.usable_attention(), self.facts()
        if not classes:
            return Geometry(HEAD_DIMS[0], own.page_size, _first(DTYPES, [own.dtypes]))
        chosen = [classes[backend] if backend is not None else next(iter(classes.values()))]
        if backend is None:
            wide = (
                other for other in classes.values() if other.facts.dtypes is None or DTYPES[0] in other.facts.dtypes
            )
            chosen += [other for other in wide if other is not chosen[0]][:1]
        facts = [item.facts for item in chosen]
        return Geometry(
            _first(HEAD_DIMS, [item.head_dims for item in facts]),
            _first(PAGE_SIZES, [item.page_sizes for item in facts]),
            _first(DTYPES, [own.dtypes, facts[-1].dtypes]),
        )

    def computed_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of the device's facts that a backend takes too; all of them if there is
        no backend."""
        taken = [item.facts.dtypes for item in self.usable_attention().values()]
        served = (name for name in self.facts().dtypes if any(names is None or name in names for names in taken))
        return tuple(served) if taken else self.facts().dtypes

    def other_dtypes(self) -> tuple[str, ...]:
        """Return, as a tuple of one name, a 16-bit dtype that the device and its preferred backend
        take, if that backend does not take the dtype of `geometry`; otherwise ()."""
        first = next(iter(self.usable_attention().values()), None)
        taken = first.facts.dtypes if first is not None else None
        own = _first(("bfloat16", "float16", "float32"), [self.facts().dtypes, taken])
        return () if taken is None or self.geometry().dtype in taken else (own,)

    def obstacle(self) -> str:
        """Return why the device can not run here, as its probe reports when the device is requested
        by name; empty if it can."""
        failure = run_probe(self.package, named=True).first_failure
        if failure is None:
            return ""
        what, fact = failure
        return f"{self.name} is not usable here: {what}: {fact.evidence}; {fact.remedy}"

    def start(self, config: EngineConfig, model: Path, kind: PoolKind | None = None) -> StartedDevice:
        """Run the bring-up over a checkpoint folder and return the started device, with pools of
        `kind` instead of the device's own unless None. Waits; the caller closes the worker. Raises
        what a step raises."""
        ledger = DecisionLedger(strict=config.strict)
        given = {
            "config": config,
            "package": self.package,
            "facts": self.facts(),
            "ledger": ledger,
            "progress": _no_progress,
            "model_path": model,
        }
        built = (self.order() if kind is None else _with_pools(self.order(), kind)).run(given)
        return StartedDevice(built["worker"], built, ledger)


def _with_pools(order: BringUp, kind: PoolKind) -> BringUp:
    def pool_kind() -> PoolKind:
        return kind

    has_own = any(step.provides == "pool_kind" for step in order.steps)
    return order.replace("pool_kind", pool_kind) if has_own else order.insert(pool_kind, before="sizes")


def find_target(name: str) -> Target:
    """Return the installed device of this name. Raises DeviceError if there is none, or the error
    of its loading."""
    item = find_installed(discover(), Requested(name, "the argument"))
    return Target(item.loaded(), item.distribution, item.version, package_folder(name))


def package_folder(name: str) -> Path | None:
    """Return the folder of the package that declares the device `name`, if it has `gaps.toml`,
    `bring_up.txt` or `conformance.toml`; otherwise None. Does not import the package."""
    for point in entry_points(group=GROUP, name=name):
        folder = _module_folder(point)
        if folder is not None and any((folder / name).is_file() for name in ("gaps.toml", "bring_up.txt", FILE)):
            return folder
    return None


def _module_folder(point: EntryPoint) -> Path | None:
    spec = find_spec(point.module.split(".")[0])
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def reads_heads(kind: Any) -> bool:
    """Return whether an attention backend of the torch runtime reads keys and values of heads, in
    any layout; not one that reads rows alone."""
    from sglcore.runtime.memory.pools import POOL_KINDS

    return any(map(kind.facts.takes_layout, POOL_KINDS))


def _refuses(backend: Any) -> bool:
    try:
        return bool(backend.unavailable())
    except Exception:  # There is no device to ask; the laws that need one do not run.
        return False


def _first(wanted: tuple[Any, ...], allowed: Sequence[tuple[Any, ...] | None]) -> Any:
    """Return the first wanted value that all allow; without one, the first value of the first
    `allowed` that is not None. None allows any value.
    """
    for value in wanted:
        if all(values is None or value in values for values in allowed):
            return value
    return next((values[0] for values in allowed if values is not None), wanted[0])


def _no_progress(phase: str, done: int, total: int) -> None:
    """Do nothing: the progress function of the kit's starts."""
