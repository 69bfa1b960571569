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
    """Add the options `--sim`, `--sim-devices` and `--sim-memory` to pytest; pytest calls it."""
    group = parser.getgroup("simulated accelerator")
    group.addoption(
        "--sim", default="", help="the simulated device of this run: KIND or KIND:CHIP, such as npu or hip:MI355X"
    )
    group.addoption("--sim-devices", type=int, default=2, help="number of devices (2)")
    group.addoption("--sim-memory", default="8g", help="memory of each device, in bytes or with a unit k, m, g (8g)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers `sim` and `sim_faults`, and install the device of `--sim`, if given,
    before the tests' modules are imported; pytest calls it. It installs none in the controller of
    pytest-xdist, nor in a process that has one."""
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
    """Return the simulated device of this process, or None if none is installed. It does not import
    torch."""
    return sglcore_sim.current() if "sglcore_sim.simulator" in sys.modules else None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of pytest's header that names the simulated device, or None without a
    device."""
    sim = installed()
    return (
        f"simulated device: {sim.devices} of {sim.kind.name} {sim.kind.arch}, {sim.memory >> 20} MiB each"
        if sim
        else None
    )


def size(text: str) -> int:
    """Return the number of bytes of a text such as "8g", "512M" or "4096"; k, m and g are powers of
    1024. Raises pytest.UsageError for another text."""
    found = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if found is None:
        raise pytest.UsageError(f"found --sim-memory {text!r}, wanted bytes, or a number with one of k, m, g")
    return int(found[1]) * UNITS[found[2]]


def capabilities(sim: Simulator | None) -> frozenset[str]:
    """Return the capabilities that a test may require: for every device "device", "streams",
    "graphs", "pinned_memory" and "collectives"; "several_devices" if there are two or more; and
    those of the kind, such as "neutral_graph" (torch.accelerator.Graph) and "graph_update"
    (captured calls that the host rewrites). Empty without a device."""
    if sim is None:
        return frozenset()
    offered = {"device", "streams", "graphs", "pinned_memory", "collectives"}
    offered |= {"several_devices"} if sim.devices > 1 else set()
    return sim.kind.capabilities | offered


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if its `sim` markers name a capability that the device lacks (without a device,
    any); otherwise reset the device, if there is one. pytest calls it before each test."""
    sim = installed()
    asked = {str(name) for mark in item.iter_markers("sim") for name in mark.args}
    missing = sorted(asked - capabilities(sim))
    if missing:
        pytest.skip(f"needs the capability {', '.join(missing)}")
    if sim is not None:
        sim.reset()  # as after a synchronize: memory freed in use is not this test's fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that passed although the device raised a fault that neither `sim.expect` nor a
    `sim_faults` marker expects, or although work still waits for the host (stuck_graph). pytest
    calls it around each test; it does nothing without a device."""
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
    """Yield the simulated device, without accesses, counters or faults of earlier tests, and reset
    it after the test. Skip the test if there is no device."""
    device = installed()
    if device is None:
        pytest.skip("needs the capability device: run with --sim=KIND")
    gc.collect()
    device.reset()
    yield device
    device.reset()
