"""An engine on the second of two devices gives the same tokens as on the first and does not touch
the first; defects that use it are caught."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.device.discovery import discover
from sglcore.engine import start
from sglcore.runtime.memory.pools import MHATokenToKVPool
from sglcore.runtime.token_table import TokenTable
from tests.attention.on_packages import over_heads
from tests.laws import half
from tests.laws.engine import Result, TokenEngine, random_prompts

pytestmark = [pytest.mark.needs("streams", "simulator", "graphs.full"), pytest.mark.sim("several_devices")]

PROMPTS = random_prompts(3, (5, 17))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield half.checkpoint(tmp_path_factory.mktemp("second"))[1]


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    yield
    torch.accelerator.set_device_index(0)


@dataclass(frozen=True, slots=True)
class Ran:
    """An engine's results, the most bytes that it allocated on the other device, and the devices
    that were current after its start and in its steps."""

    results: list[Result]
    elsewhere: int
    current: set[int]


def run(folder: Path, index: int, **settings: Any) -> Ran:
    """Run an engine on one of the two devices, with graphs; before its start the other device is
    current."""
    other = 1 - index
    torch.accelerator.set_device_index(other)
    torch.accelerator.synchronize(other)
    torch.accelerator.reset_peak_memory_stats(other)
    before = torch.accelerator.memory_allocated(other)
    made = TokenEngine(folder, device=f"{os.environ['LANE_DEVICE']}:{index}", graph="full", **settings)
    forward, current = made.worker.runner.forward, {torch.accelerator.current_device_index()}

    def watched(batch: Any) -> Any:
        current.add(torch.accelerator.current_device_index())
        return forward(batch)

    made.worker.runner.forward = watched
    results = made.run(PROMPTS, 6, stagger=2)
    made.worker.close()
    return Ran(results, torch.accelerator.max_memory_allocated(other) - before, current)


def vendors_attention() -> str:
    """Return the package's first attention backend that is not the core's."""
    package = next(item.loaded() for item in discover() if item.name == os.environ["LANE_DEVICE"])
    own = [name for name in over_heads(package) if name not in ("triton", "gathered")]
    return own[0] if own else pytest.skip("needs an attention backend of the vendor's")


@pytest.mark.parametrize("is_vendors", [False, True])
def test_an_engine_on_the_second_device_leaves_the_first_alone_and_gives_the_same_tokens(
    checkpoint: Path, is_vendors: bool
) -> None:
    settings: dict[str, Any] = {}
    if is_vendors:
        settings = {"attention_backend": vendors_attention(), "page_size": None, "dtype": "float16"}
    first, second = run(checkpoint, 0, **settings), run(checkpoint, 1, **settings)
    assert [result.tokens for result in second.results] == [result.tokens for result in first.results]
    assert (first.elsewhere, second.elsewhere) == (0, 0)
    assert (first.current, second.current) == ({0}, {1})


def on_its_own(engine: TokenEngine, index: int) -> None:
    """Check that every forward of the engine finds its own device current."""
    forward = engine.worker.runner.forward

    def watched(batch: Any) -> Any:
        assert torch.accelerator.current_device_index() == index
        return forward(batch)

    engine.worker.runner.forward = watched


def without_streams(patch: pytest.MonkeyPatch) -> None:
    """Make the device one without streams, so that only the current device's index selects it."""
    real = start.resolve

    def other(ref: str, package: str = "") -> Any:
        found = real(ref, package)
        if not ref.endswith(":facts"):
            return found
        return lambda index: replace(found(index), has_streams=False, default_graph="off")

    patch.setattr(start, "resolve", other)


@pytest.mark.parametrize("has_streams", [True, False])
def test_two_engines_of_one_thread_run_each_on_its_own_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, has_streams: bool
) -> None:
    if not has_streams:
        without_streams(monkeypatch)
    name = os.environ["LANE_DEVICE"]
    engines = [TokenEngine(checkpoint, device=f"{name}:{index}") for index in (0, 1)]
    for index, engine in enumerate(engines):
        on_its_own(engine, index)
    tokens = [[result.tokens for result in engine.run(PROMPTS, 4)] for engine in (*engines, engines[0])]
    assert tokens[0] == tokens[1] == tokens[2]


def cells_on_the_first(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a pool on the right kind of device, without the index."""
    real = MHATokenToKVPool.__init__

    def make(self: Any, *given: Any, **named: Any) -> None:
        with torch.accelerator.device_index(0):
            real(self, *(_unnumbered(value) for value in given), **{n: _unnumbered(v) for n, v in named.items()})

    patch.setattr(MHATokenToKVPool, "__init__", make)


def table_on_the_first(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a table made on the first device and then moved."""
    real = TokenTable.__init__

    def make(self: Any, *given: Any) -> None:
        real(self, *given)
        self.last = self.last.to(torch.device(self.last.device.type, 0)).to(self.last.device)

    patch.setattr(TokenTable, "__init__", make)


def first_stays_current(patch: pytest.MonkeyPatch) -> None:
    """Mutant: the bring-up sets no current device."""
    real = torch.accelerator.set_device_index
    patch.setattr(torch.accelerator, "set_device_index", lambda index: None if index else real(index))


def _unnumbered(value: Any) -> Any:
    return torch.device(value).type if isinstance(value, (str, torch.device)) else value


@pytest.mark.sim_faults("device_mismatch")
@pytest.mark.parametrize("defect", [cells_on_the_first, table_on_the_first, first_stays_current])
def test_what_is_made_on_the_first_device_is_caught(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, defect: Any
) -> None:
    defect(monkeypatch)
    try:
        found = run(checkpoint, 1)
    except RuntimeError as error:
        assert "device" in str(error)  # tensors on two devices
    else:
        assert found.elsewhere > 0 or found.current != {1}
