"""Broken declarations: probes, facts, orders and backends that a package must not have. Imports no
tensor library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglcore.conformance.mutant import TORCH, Mutant
from sglcore.device.bring_up import BringUp, Step
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.device.probe import DeviceInfo, Fact, ProbeReport
from sglcore.device.system import System

HERE = "sglcore.conformance.mutants.mutants_package"


def heavy_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: imports a tensor library."""
    import torch

    fact = Fact(True, f"torch {torch.__version__}")
    return ProbeReport(fact, fact, fact, fact)


def opening_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: opens a device node."""
    with open("/dev/zero", "rb"):
        fact = Fact(True, "it opens")
    return ProbeReport(fact, fact, fact, fact)


def raising_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: raises AssertionError if a file of the driver is missing."""
    text = system.read("/no/such/file")
    assert text is not None, "the driver's file is missing"
    fact = Fact(True, text)
    return ProbeReport(fact, fact, fact, fact)


def silent_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: reports no hardware without a remedy."""
    fact = Fact(False, "nothing is there", "")
    return ProbeReport(fact, fact, fact, fact)


def lying_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: reports hardware on every machine."""
    fact = Fact(True, "a module of that name can be found")
    return ProbeReport(fact, fact, fact, fact)


def misnumbered_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: gives the only device the system's number, 3, instead of 0,
    its number in the process."""
    fact = Fact(True, "here")
    return ProbeReport(fact, fact, fact, fact, devices=(DeviceInfo(3, "the fourth"),))


def listing_probe(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: lists a device although it found no hardware."""
    fact = Fact(False, "no node", "plug it in")
    return ProbeReport(fact, fact, fact, fact, devices=(DeviceInfo(0, "perhaps"),))


def unknown_as_nothing(named: bool, system: System) -> ProbeReport:
    """A broken `DevicePackage.probe`: reports 0 instead of None for an unknown memory size."""
    fact = Fact(True, "here")
    return ProbeReport(fact, fact, fact, fact, devices=(DeviceInfo(0, "here", 0),))


def blind_probe(named: bool) -> ProbeReport:
    """A broken `DevicePackage.probe`: takes no `system`, so it examines the machine that it runs
    on."""
    fact = Fact(True, "here")
    return ProbeReport(fact, fact, fact, fact)


def asking_facts(index: int = 0) -> Facts:
    """A broken `DevicePackage.facts`: queries the current device, so it fails without one."""
    import torch

    return Facts(tensor_device=f"{torch.accelerator.current_device_index()}")


def first_facts(index: int = 0) -> Facts:
    """A broken `DevicePackage.facts`: returns the facts of the first device for every index."""
    return Facts(tensor_device="meta:0")


class HalfAttention:
    """A class without the constructor and methods of an attention backend, declared as one."""


def _declares(name: str, says: str, needs: frozenset[str] = frozenset(), **changes: Any) -> Mutant:
    """Return a mutant with changed fields of the declaration (`changes`, by name): a dict is added
    to the field's mapping, any other value replaces the field's. `needs`: capabilities that the
    device needs."""

    def planted(package: DevicePackage) -> DevicePackage:
        added = {key: {**getattr(package, key), **new} for key, new in changes.items() if isinstance(new, dict)}
        return replace(package, **{**changes, **added})

    return Mutant(name=name, says=says, package=planted, needs=needs)


def _probe(name: str, says: str, function: Callable[..., object], **more: Any) -> Mutant:
    return _declares(name, says, probe=f"{HERE}:{getattr(function, '__name__')}", **more)  # noqa: B009


def _facts(name: str, says: str, **lies: Any) -> Mutant:
    return Mutant(name=name, says=says, facts=lambda facts: replace(facts, **lies))


def worker_first(order: BringUp) -> BringUp:
    """Return the order of the bring-up with its last step, which makes the worker, first."""
    return BringUp((order.steps[-1], *order.steps[:-1]))


def warm_up(config: Any) -> None:
    """Do nothing: a step that is added to the bring-up and that the package's `bring_up.txt` does
    not list."""


def _unwritten(order: BringUp) -> BringUp:
    return order.insert(warm_up, after=order.steps[-1].provides)


def _without_exports(order: BringUp) -> BringUp:
    return BringUp(replace(step, is_exported=False) for step in order.steps)


def _forgets(name: str, need: str) -> Callable[[BringUp], BringUp]:
    """Return a change of an order after which the step `name` does not declare that it needs
    `need`; an order without this step stays the same."""

    def planted(order: BringUp) -> BringUp:
        return BringUp(
            replace(step, needs=tuple(other for other in step.needs if other != need))
            if isinstance(step, Step) and step.provides == name
            else step
            for step in order.steps
        )

    return planted


NAMES_NOTHING = _declares(
    "names nothing", "A reference to a name that does not exist.", kernels={"none": f"{HERE}:no_such_name"}
)
HEAVY_PROBE = _probe("heavy probe", "A probe that uses a tensor library.", heavy_probe)
OPENS_NODE = _probe("opens a node", "A probe that opens a device node.", opening_probe)
RAISING_PROBE = _probe("raising probe", "A probe that assumes that a file is there.", raising_probe)
SILENT_PROBE = _probe("silent probe", "A fact without a remedy.", silent_probe)
LYING_PROBE = _probe("lying probe", "Hardware is reported where there is none.", lying_probe, is_host=False)
MISNUMBERED = _probe(
    "misnumbered", "A device with the number of the system instead of the process.", misnumbered_probe, is_host=True
)
LISTS_ABSENT = _probe("lists what is absent", "Devices are listed although no hardware was found.", listing_probe)
NO_MEMORY = _probe("no memory", "An unknown memory size is reported as 0.", unknown_as_nothing, is_host=True)
ALWAYS_THE_FIRST = _declares(
    "always the first", "Facts of the first device for every number.", facts=f"{HERE}:first_facts"
)
WRONG_ORDER = Mutant(name="wrong order", says="The worker is made before the parts that it needs.", order=worker_first)
EXPORTS_NOTHING = Mutant(
    name="exports nothing",
    says="The nested orders of features export nothing, and steps outside need their results.",
    order=_without_exports,
    needs=TORCH,
)
FINDS_POOLS_LATER = Mutant(
    name="finds pools later",
    says="The hisparse step does not declare that it needs the pools.",
    order=_forgets("hisparse", "pools"),
    needs=TORCH,
)
FINDS_ROWS_LATER = Mutant(
    name="finds rows later",
    says="The attention step does not declare that it needs hisparse.",
    order=_forgets("attention", "hisparse"),
    needs=TORCH,
)
UNWRITTEN_STEP = Mutant(name="unwritten step", says="A step that the text lacks.", order=_unwritten)
UNKNOWN_DEVICE = _facts("unknown device", "Tensors on a device that no tensor library knows.", tensor_device="banana")
UNKNOWN_INDEX = _facts("unknown index", "Indices of a dtype that does not exist.", index_dtype="banana")
UNKNOWN_DTYPE = _facts("unknown dtype", "Computes in a dtype that does not exist.", dtypes=("float32", "banana"))
PREFERS_OTHER = _facts(
    "prefers another", "Prefers a dtype that it lacks.", dtypes=("float32",), preferred_dtype="bfloat16"
)
NO_PAGES = _facts("pages of nothing", "Pages without KV slots.", page_size=0)
HOST_STREAMS = _facts("host streams", "Streams of the host's tensors.", tensor_device="cpu", has_streams=True)
PINNED_AND_SHARED = _facts(
    "pinned and shared",
    "Pinned memory for copies, although memory is shared and nothing is copied.",
    has_pinned_memory=True,
    shares_host_memory=True,
)
HOST_APART = _facts(
    "host apart",
    "The host's tensors are not in its memory.",
    tensor_device="cpu",
    has_streams=False,
    shares_host_memory=False,
)
NO_SUCH_GRAPH = _facts("no such graph", "A default graph that is not offered.", default_graph="none such")
NO_SEGMENTS = _facts("no segments", "No captured piece may exist.", most_graph_segments=0)
WRONG_FACTS = (
    UNKNOWN_DEVICE,
    UNKNOWN_INDEX,
    UNKNOWN_DTYPE,
    PREFERS_OTHER,
    NO_PAGES,
    HOST_STREAMS,
    PINNED_AND_SHARED,
    HOST_APART,
    NO_SUCH_GRAPH,
    NO_SEGMENTS,
)
ASKS_AT_IMPORT = _declares(
    "asks at import",
    "A module that reads the device's properties while it is imported.",
    TORCH,
    kernels={"asking": "sglcore.conformance.mutants.asks_at_import:kernels"},
)
ASKS_FOR_FACTS = _declares(
    "asks for facts", "Facts that only a machine with the device can tell.", TORCH, facts=f"{HERE}:asking_facts"
)
BLIND_PROBE = _probe("blind probe", "A probe that takes no system.", blind_probe)
BOASTS = _declares(
    "boasts",
    "A backend that takes a dtype that does not exist.",
    TORCH,
    attention={"boasts": "sglcore.conformance.mutants.mutants_attention:Boasts"},
)
HALF_ATTENTION = _declares(
    "half attention", "A backend without the contract's methods.", attention={"half": f"{HERE}:HalfAttention"}
)
