"""The pytest plugin: `--sim=KIND[:chip]` installs a simulated accelerator before tests are
collected.

A process has one kind. Each worker of pytest-xdist installs its own; the controller has none. The
plugin imports torch only to install a device. A test that passes although a fault was raised and
swallowed fails. `@pytest.mark.sim(...)` skips a test if the device lacks one of these capabilities;
`@pytest.mark.sim_faults(...)` lists the kinds of faults that a test leaves on purpose.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import sglcore_sim

if TYPE_CHECKING:
    from sglcore_sim.simulator import Simulator

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--sim`, `--sim-devices` and `--sim-memory`."""
    group = parser.getgroup("simulated accelerator")
    group.addoption(
        "--sim", default="", help="the simulated device of this run: KIND or KIND:CHIP, such as npu or hip:MI355X"
    )
    group.addoption("--sim-devices", type=int, default=2, help="number of devices (2)")
    group.addoption("--sim-memory", default="8g", help="memory of each device, in bytes or with a unit k, m, g (8g)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Install the device before the tests' modules are imported."""
    config.addinivalue_line(
        "markers", "sim(*capabilities): what the simulated device must offer, see sglcore_sim.plugin.capabilities"
    )
    config.addinivalue_line("markers", "sim_faults(*kinds): the test leaves faults of these kinds on purpose")
    kind = str(config.getoption("--sim"))
    hands_out = bool(config.getoption("numprocesses", default=None))  # pytest-xdist's controller
    if kind and not hands_out and installed() is None:
        os.environ["TRITON_INTERPRET"] = "1"
        sglcore_sim.install(
            kind,
            devices=int(str(config.getoption("--sim-devices"))),
            memory=size(str(config.getoption("--sim-memory"))),
        )


def installed() -> Simulator | None:
    """Return the simulated device of this process, if any, without importing torch."""
    return sglcore_sim.current() if "sglcore_sim.simulator" in sys.modules else None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line that names the simulated device."""
    sim = installed()
    return (
        f"simulated device: {sim.devices} of {sim.kind.name} {sim.kind.arch}, {sim.memory >> 20} MiB each"
        if sim
        else None
    )


def size(text: str) -> int:
    """Return the bytes of a text such as "8g", "512m" or a plain number. Raises
    pytest.UsageError."""
    found = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if found is None:
        raise pytest.UsageError(f"found --sim-memory {text!r}, wanted bytes, or a number with one of k, m, g")
    return int(found[1]) * UNITS[found[2]]


def capabilities(sim: Simulator | None) -> frozenset[str]:
    """Return the capabilities that a test may require: "device", "streams", "graphs",
    "pinned_memory", "collectives", "several_devices", and those of the kind, such as
    "neutral_graph" (torch.accelerator.Graph) and "graph_update" (captured calls that the host
    rewrites). Empty without a device."""
    if sim is None:
        return frozenset()
    offered = {"device", "streams", "graphs", "pinned_memory", "collectives"}
    offered |= {"several_devices"} if sim.devices > 1 else set()
    return sim.kind.capabilities | offered


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that requires a missing capability, and reset the device before other tests."""
    sim = installed()
    asked = {str(name) for mark in item.iter_markers("sim") for name in mark.args}
    missing = sorted(asked - capabilities(sim))
    if missing:
        pytest.skip(f"needs the capability {', '.join(missing)}")
    if sim is not None:
        sim.reset()  # as after a synchronize: memory freed in use is not this test's fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that passed although a fault was raised and swallowed."""
    result = yield
    sim = installed()
    if sim is None:
        return result
    sim.unfinished()
    meant = {str(kind) for mark in item.iter_markers("sim_faults") for kind in mark.args}
    swallowed = [str(fault) for fault in sim.faults if fault.kind not in meant]
    if swallowed:
        sim.reset()
        pytest.fail("the device raised faults that the code swallowed:\n" + "\n".join(swallowed), pytrace=False)
    return result


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """Yield the simulated device, without accesses, counters or faults of earlier tests; skip the
    test if there is no device."""
    device = installed()
    if device is None:
        pytest.skip("needs the capability device: run with --sim=KIND")
    gc.collect()
    device.reset()
    yield device
    device.reset()
