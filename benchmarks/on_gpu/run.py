"""The environment of a part: the device from its package, timing and graphs on it, and the bounds
measured in this run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.selection import Choice
from sglcore.engine.start import bring_up, choose, embedded_model, facts_of, no_progress
from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.graphs.graph_backend import GraphBackend
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.streams import Streams, entered

from .child import PartFailed, Report
from .sizes import Geometry, Sizes

STATE = ("clock_rate", "temperature", "power_draw")
"""Functions of torch's device modules that report the card's state, if the vendor's library is
installed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Speeds measured in this run: bytes per second read and written by a copy, bytes per second of
    reading only, and operations per second of a large matrix product. None: a dry run."""

    copy: float | None
    read: float | None
    flops: float | None

    def us(self, read: float, flops: float = 0.0) -> float | None:
        """Return the lower bound in microseconds: the larger of `read` bytes at the faster of both
        bandwidths and `flops` operations. None in a dry run."""
        if self.copy is None or self.read is None or self.flops is None:
            return None
        return 1e6 * max(read / max(self.copy, self.read), flops / self.flops)


class Run:
    """One part's run on the chosen device. `of`: the name of the geometry that it measures."""

    def __init__(
        self, report: Report, sizes: Sizes, settings: Mapping[str, Any], earlier: Mapping[str, Any], of: str
    ) -> None:
        """Run the device's bring-up up to its kernels. Raises PartFailed for a device that does not
        use torch, and for the CPU."""
        self.report, self.sizes, self.earlier, self.of = report, sizes, earlier, of
        self.settings = {**sizes.settings, **settings}
        self.is_dry = sizes.rounds == 1
        self.config: EngineConfig = resolve_config({"device": settings.get("device")})
        ledger = DecisionLedger()
        self.choice: Choice = choose(self.config, ledger)
        self.package: DevicePackage = self.choice.package
        self.facts: Facts = facts_of(self.choice)
        given = self.config, embedded_model(), self.choice, ledger, no_progress
        if self.package.is_host:
            raise PartFailed(
                "the device that would run is the processor: make bench-cpu measures that, --device names another"
            )
        built, _ = bring_up(*given, last="kernels")
        if missing := {"device", "streams", "kernels"} - built.keys():
            raise PartFailed(
                f"the package of {self.package.name!r} has no step {', '.join(sorted(missing))}: not of torch"
            )
        self.device: torch.device = built["device"]
        self.streams: Streams = built["streams"]
        self.kernels: KernelTable = built["kernels"]
        self.ledger = {row.topic: f"{row.effective}: {row.reason}" for row in ledger.rows}

    @property
    def geometry(self) -> Geometry:
        """The geometry that this part measures."""
        return self.sizes.geometries[self.of]

    @cached_property
    def bounds(self) -> Bounds:
        """The results of the part `bounds`. Raises PartFailed if it did not complete."""
        found = {row["bound"]: row["value"] for row in self.earlier.get("bounds", {}).get("rows", ())}
        if missing := {"copy", "read", "product"} - found.keys():
            raise PartFailed(f"bounds did not measure {', '.join(sorted(missing))}; run it first")
        return Bounds(found["copy"], found["read"], found["product"])

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to the stream of graph capture, without autograd."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        forward = self.streams.forward
        stack.enter_context(self.streams.running() if forward is None else entered(forward))
        return stack

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        torch.accelerator.synchronize(self.device.index or 0)

    def us(self, step: Callable[[], object], repeats: int | None = None) -> float | None:
        """Return microseconds of one call by device events: the median of the rounds after a warm-
        up round. None in a dry run."""
        count, found = repeats or self.sizes.repeats, list[float]()
        with self.stream():
            for _ in range(1 + self.sizes.rounds):
                begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(count):
                    step()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / count)
        return None if self.is_dry else statistics.median(found[1:])

    def graphs(self) -> GraphBackend | None:
        """Return the device's backend of full graphs; None if it has none."""
        ref = self.package.graphs.get("full")
        return None if ref is None else resolve(ref, self.package.name)(self.facts, self.streams)

    def replayed_us(
        self, step: Callable[[], Tensor], repeats: int | None = None, update: HostUpdate | None = None
    ) -> float | None:
        """Measure like `us` the replay of a step's graph, or the step if the device has no graphs.
        Frees the graph. `update`: the result of an attention backend's `refresh`."""
        backend = self.graphs()
        if backend is None:
            return self.us(step, repeats)
        try:
            with self.stream():
                captured = backend.capture(step)
            return self.us(lambda: captured.replay(update), repeats)
        finally:
            backend.close()

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a tensor of normal values; zeros would run faster than real data."""
        with self.stream():
            return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def state(self) -> dict[str, float]:
        """Read clock, temperature and power, as far as the device reports them."""
        module, found = torch.get_device_module(self.device.type), dict[str, float]()
        for name in STATE:
            try:
                found[name] = float(getattr(module, name)())
            except Exception:  # no such function, or the vendor's library is not there
                continue
        return found

    def about(self) -> dict[str, Any]:
        """Describe the device, its memory in bytes, and its package."""
        module = torch.get_device_module(self.device.type)
        chosen, number = self.choice.chosen, self.device.index or 0
        try:
            name = module.get_device_name(number)
        except Exception:
            name = str(self.device)
        free, total = torch.accelerator.get_memory_info(number)
        package = f"{chosen.distribution} {chosen.version}"
        return {"device": name, "type": str(self.device), "package": package, "memory": total, "free": free}


def share(bound: float | None, us: float | None) -> float | None:
    """Return the reached share of a bound; None without figures."""
    return None if bound is None or not us else bound / us
