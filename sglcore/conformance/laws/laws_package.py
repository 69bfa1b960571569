"""Laws of level C0 (package): the package by itself. Nothing runs on the device, so these laws also
hold on a machine without it."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from sglcore.conformance import no_device
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken, NotApplicable
from sglcore.conformance.mutant import TORCH
from sglcore.conformance.mutants import mutants_package as broken
from sglcore.conformance.target import DTYPES, GIVEN, Target
from sglcore.core.errors import BringUpError, DeviceError
from sglcore.device.bring_up import Again, BringUp, Step
from sglcore.device.facts import Facts
from sglcore.device.import_references import modules
from sglcore.device.package import API, resolve

PROBE_SECONDS = 120
IMPORT_SECONDS = 300
INDEX_DTYPES = ("int32", "int64")
MADE_WITH = ("pools", "hisparse", "attention", "runner")
"""Bring-up steps of the torch runtime, in order; each step needs the result of the one before it.
"""

_PROBE = """
import json, sys
before = set(sys.modules)
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
nodes = []
sys.addaudithook(
    lambda event, args: nodes.append(str(args[0])) if event == "open" and str(args[0]).startswith("/dev/") else None
)
from pathlib import Path
from dataclasses import asdict
from sglcore.device.package import resolve
from sglcore.device.system import System, host_system
probe, reports, devices = resolve(given["probe"]), {}, {}
for place, system in {"here": host_system(), "empty": System(Path(given["empty"]))}.items():
    for named in (False, True):
        report = probe(named, system)
        where = f"{place}, named" if named else place
        reports[where] = {name: asdict(fact) for name, fact in report.facts.items()}
        devices[where] = [asdict(device) for device in report.devices]
print(json.dumps({
    "reports": reports,
    "devices": devices,
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "nodes": nodes,
}))
"""


def refs_resolve(trial: Trial) -> None:
    """Import everything that the package names. Raises LawBroken if something can not be imported;
    only an attention backend may fail with ImportError, because its library may be missing here."""
    package = trial.target.package
    for ref in package.refs():
        try:
            resolve(ref, package.name)
        except DeviceError as error:
            raise LawBroken(str(error)) from error
        except ImportError as error:
            if ref not in package.attention.values():
                raise LawBroken(f"{ref!r} cannot be imported: {error}") from error


def probe_is_light(trial: Trial) -> None:
    """Run the probe in a process of its own. Raises LawBroken if it imports a module that is
    neither the standard library's nor its own package's or sglcore's, or opens a device node."""
    seen = _run_probe(trial.target)
    own = {"sglcore", *(module.partition(".")[0] for module in modules(trial.target.package.probe))}
    foreign = sorted(set(seen["modules"]) - own - sys.stdlib_module_names)
    if foreign:
        raise LawBroken(f"the probe of {trial.target.name!r} imports {', '.join(foreign)}")
    nodes = sorted(set(seen["nodes"]) - {"/dev/null"})
    if nodes:
        raise LawBroken(f"the probe of {trial.target.name!r} opens {', '.join(nodes)}")


def four_facts(trial: Trial) -> None:
    """Probe this machine, and one where nothing is installed, each with the device requested by
    name and not. Raises LawBroken if a fact has no evidence, if one that does not hold has no
    remedy, or if hardware is found on the empty machine."""
    seen = _run_probe(trial.target)
    for where, facts in seen["reports"].items():
        for name, fact in facts.items():
            if not fact["evidence"]:
                raise LawBroken(f"{where}: the fact {name!r} has no evidence")
            if not fact["holds"] and not fact["remedy"]:
                raise LawBroken(f"{where}: the fact {name!r} does not hold and has no remedy")
    if seen["reports"]["empty"]["hardware"]["holds"] and not trial.target.package.is_host:
        raise LawBroken(
            f"hardware was reported on an empty machine: {seen['reports']['empty']['hardware']['evidence']}"
        )


def devices_are_listed(trial: Trial) -> None:
    """Probe as `four_facts` does and check the devices that are listed. Raises LawBroken if they
    are not numbered from 0, lack a name, have 0 bytes of memory, or are listed where no hardware
    was found. A list may be empty."""
    seen = _run_probe(trial.target)
    for where, devices in seen["devices"].items():
        if devices and not seen["reports"][where]["hardware"]["holds"]:
            raise LawBroken(f"{where}: {len(devices)} devices are listed, but no hardware was found")
        numbers = [device["index"] for device in devices]
        if numbers != list(range(len(devices))):
            raise LawBroken(
                f"{where}: the devices are numbered {numbers}; wanted 0 and up, as the process numbers them"
            )
        for device in devices:
            if not device["name"] or device["memory"] == 0:
                raise LawBroken(f"{where}: {device} has no name or no memory; an unknown memory size must be None")


def facts_of_the_number(trial: Trial) -> None:
    """Raise LawBroken unless the facts of device index 0 and 1 each name a tensor device with that
    index, or with none."""
    package = trial.target.package
    for index in (0, 1):
        name = resolve(package.facts, package.name)(index).tensor_device
        number = name.partition(":")[2]
        if number not in ("", str(index)):
            raise LawBroken(f"the facts of device {index} place its tensors on {name!r}")


def _run_probe(target: Target) -> Mapping[str, Any]:
    """Run the probe in a fresh process, here and on an empty machine, named and not; return its
    facts (`reports`) and devices by these, and the modules and device nodes that it loaded. Raises
    LawBroken with the probe's traceback if it raises."""
    with tempfile.TemporaryDirectory() as empty:
        given = {"path": sys.path, "probe": target.package.probe, "empty": empty}
        command = (sys.executable, "-c", _PROBE, json.dumps(given))
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if ran.returncode:
        raise LawBroken(f"the probe raised:\n{ran.stderr.strip()}")
    return json.loads(ran.stdout.strip().splitlines()[-1])


def imports_touch_no_device(trial: Trial) -> None:
    """Import the package's references in a process in which torch sees no device (`no_device.py`).
    Raises LawBroken if an import fails there, or if the package's code queries the device."""
    target, package = trial.target, trial.target.package
    hides = "torch_runtime" in target.capabilities()
    given = {"path": sys.path, "refs": package.refs(), "facts": package.facts, "hide": hides}
    command = (sys.executable, no_device.__file__, json.dumps(given))
    search = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=IMPORT_SECONDS,
        check=False,
        env=search,
        cwd=tempfile.gettempdir(),
    )
    if ran.returncode:
        raise LawBroken(f"the package cannot be imported without a device:\n{ran.stderr.strip()}")
    if asked := json.loads(ran.stdout.strip().splitlines()[-1]):
        raise LawBroken(f"the package queries the device while it is imported or makes its facts: {'; '.join(asked)}")


def order_checks(trial: Trial) -> None:
    """Raise LawBroken unless each step of the bring-up has its needs met by the given values or by
    earlier steps, which export them from other nested orders, and one step provides `worker`. Runs
    no step."""
    order = trial.target.order()
    try:
        order.check(GIVEN)
    except BringUpError as error:
        raise LawBroken(str(error)) from error
    if "worker" not in {step.provides for step in order.steps}:
        raise LawBroken("no step of the bring-up provides 'worker'")


def reversed_order_fails(trial: Trial) -> None:
    """Move each step of MADE_WITH before the step that it needs. Raises LawBroken unless the
    order's check refuses that and names both steps. Runs no step: the needs of a step are its
    parameters."""
    order = trial.target.order()
    here = {step.provides for step in order.steps}
    for need, name in pairwise(MADE_WITH):
        if not {need, name} <= here:
            raise LawBroken(f"no step provides {need!r}, or no step provides {name!r}")
        moved = next(step for step in order.steps if step.provides == name)
        wanted = f"step {moved.path!r} needs {need!r}, which a later step provides"
        try:
            _ahead(order, moved, need).check(GIVEN)
        except BringUpError as error:
            if wanted not in str(error):
                raise LawBroken(f"with step {name!r} before {need!r}: {error}; wanted {wanted}") from error
        else:
            raise LawBroken(f"step {name!r} before {need!r} passes the check; wanted {need!r} as a parameter of it")


def _ahead(order: BringUp, moved: Step | Again, other: str) -> BringUp:
    """Return the order with the step `moved` directly before `other`."""
    steps = [step for step in order.steps if step is not moved]
    steps.insert([step.provides for step in steps].index(other), moved)
    return BringUp(steps)


def order_is_written_down(trial: Trial) -> None:
    """Raise LawBroken unless the package's `bring_up.txt` is the output of `sglcore devices NAME
    --bring-up`; NotApplicable if the package's folder is unknown."""
    folder, order = trial.target.folder, trial.target.order()
    if folder is None:
        raise NotApplicable("the package's own files are not installed here")
    file = folder / "bring_up.txt"
    remedy = f"write it with: sglcore devices {trial.target.name} --bring-up > {file}"
    if not file.is_file():
        raise LawBroken(f"there is no {file}; {remedy}")
    written = file.read_text(encoding="utf-8").splitlines()
    for number, (old, new) in enumerate(_pairs(written, order.text().splitlines()), 1):
        if old != new:
            raise LawBroken(f"{file.name}:{number} has {old!r}, the order has {new!r}; {remedy}")


def _pairs(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    for index in range(max(len(old), len(new))):
        yield (old[index] if index < len(old) else "", new[index] if index < len(new) else "")


def facts_agree(trial: Trial) -> None:
    """Raise LawBroken if two calls give different facts, if a fact has a value that is not allowed,
    or if facts contradict each other or what the package offers."""
    target = trial.target
    facts = target.facts()
    if facts != target.facts():
        raise LawBroken("two calls give different facts")
    for name, is_right, wanted in _values(target, facts):
        if not is_right:
            raise LawBroken(f"{name} is {getattr(facts, name)!r}; wanted {wanted}")
    for wrong, text in _contradictions(target, facts):
        if wrong:
            raise LawBroken(text)


def _values(target: Target, facts: Facts) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether the value is allowed, what is wanted) of each fact with a limited range
    of values."""
    graphs, dtypes, most = ("off", *target.package.graphs), facts.dtypes, facts.most_graph_segments
    known = isinstance(dtypes, tuple) and set(dtypes) <= set(DTYPES) and 0 < len(dtypes) == len(set(dtypes))
    halves = (None, *(name for name in dtypes if name != "float32"))
    wanted = f"the name of a device that torch knows, or {target.name!r} if an extension brings it"
    yield "tensor_device", _is_device(target, facts.tensor_device), wanted
    yield "index_dtype", facts.index_dtype in INDEX_DTYPES, f"one of {INDEX_DTYPES}"
    yield "dtypes", known, f"a tuple of one or more of {DTYPES}, each once"
    yield "preferred_dtype", facts.preferred_dtype in halves, f"one of {halves}: None, or a 16-bit type of its dtypes"
    yield "page_size", facts.page_size >= 1, "at least 1"
    yield "default_graph", facts.default_graph in graphs, f"one of {graphs}"
    yield "most_graph_segments", most is None or most >= 1, "None, or at least 1"


def _is_device(target: Target, name: str) -> bool:
    """Return whether torch can parse the device `name`. Torch knows an extension's device only
    after the extension is loaded, and it need not be installed here; in that case the device must
    have the package's name. On another runtime, any text but an empty one."""
    if "torch_runtime" not in target.capabilities():
        return bool(name)
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        return re.fullmatch(rf"{re.escape(target.name)}(:\d+)?", name) is not None
    return True


def _contradictions(target: Target, facts: Facts) -> Iterator[tuple[bool, str]]:
    own = facts.tensor_device.partition(":")[0]
    yield facts.has_streams and own == "cpu", "has_streams is True, but the host's tensors have no streams"
    yield (
        facts.has_pinned_memory and facts.shares_host_memory,
        "has_pinned_memory and shares_host_memory are both True; shared memory needs no pinned copies",
    )
    yield (
        own == "cpu" and not facts.shares_host_memory,
        "shares_host_memory is False, but the host's tensors are in host memory",
    )
    taken = [cls.facts for cls in target.importable_attention().values()]
    if "torch_runtime" in target.capabilities():
        takes = any(f.index_dtype in (None, facts.index_dtype) for f in taken)
        yield bool(taken) and not takes, f"no attention backend takes cell indices of {facts.index_dtype}"
    fits = any(f.page_sizes is None or facts.page_size in f.page_sizes for f in taken)
    yield bool(taken) and not fits, f"no attention backend takes pages of {facts.page_size} tokens"
    idle = sorted(set(facts.dtypes) - set(target.computed_dtypes()))
    yield bool(idle), f"no attention backend takes {', '.join(idle)}, but the fact dtypes names them"


def api_holds(trial: Trial) -> None:
    """Raise LawBroken unless the API number is the one that this core understands, and the
    package's functions and attention backends can be called as that API says."""
    package = trial.target.package
    if package.api != API:
        raise LawBroken(f"the package states API {package.api}, this core understands {API}")
    _callable_with(package.probe, 2)
    _callable_with(package.facts, 1)
    for ref in package.kernels.values():
        _callable_with(ref, 0)
    for ref in package.graphs.values():
        _callable_with(ref, 2)
    implements = _implements_attention if "torch_runtime" in trial.target.capabilities() else _states_sizes
    for name, backend in trial.target.importable_attention().items():
        implements(name, backend)


def _callable_with(ref: str, count: int) -> None:
    _binds(ref, resolve(ref), count)


def _binds(what: str, function: Callable[..., object], count: int) -> None:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        raise LawBroken(f"{what} cannot be called with {count} arguments: {error}") from error


def _implements_attention(name: str, backend: Any) -> None:
    """Raise LawBroken unless a backend class has the contract's constructor, and its methods with
    the contract's parameters; `name` is for the message."""
    from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts

    if not (inspect.isclass(backend) and issubclass(backend, AttentionBackend)):
        raise LawBroken(f"attention {name!r} is not an AttentionBackend")
    missing = sorted(backend.__abstractmethods__)
    if missing:
        raise LawBroken(f"attention {name!r} lacks {', '.join(missing)}")
    if backend.forward is not AttentionBackend.forward:
        raise LawBroken(f"attention {name!r} has a `forward` of its own; wanted `attend`, which it calls")
    if not isinstance(backend.facts, AttentionFacts):
        raise LawBroken(f"attention {name!r} has no AttentionFacts as `facts`")
    if backend.facts.index_dtype not in (None, *INDEX_DTYPES):
        raise LawBroken(
            f"attention {name!r} takes cells of {backend.facts.index_dtype!r}; wanted None or {INDEX_DTYPES}"
        )
    _states_sizes(name, backend)
    for method in (*AttentionBackend.__abstractmethods__, "__init__"):
        wanted = len(inspect.signature(getattr(AttentionBackend, method)).parameters)
        _binds(f"{name}.{method}", getattr(backend, method), wanted)


def _states_sizes(name: str, backend: Any) -> None:
    """Raise LawBroken unless a backend's facts state the sizes that it takes, as tuples or None,
    and each can occur, so that the kit can choose sizes."""
    try:
        sizes = (backend.facts.head_dims, backend.facts.page_sizes, backend.facts.dtypes)
    except AttributeError as error:
        raise LawBroken(f"attention {name!r} does not state the sizes that it takes: {error}") from error
    if not all(values is None or isinstance(values, tuple) for values in sizes):
        raise LawBroken(f"attention {name!r} states that it takes {sizes}; wanted tuples, or None for any")
    heads, pages, dtypes = (() if values is None else values for values in sizes)
    if not set(dtypes) <= set(DTYPES) or not all(isinstance(size, int) and size > 0 for size in (*heads, *pages)):
        raise LawBroken(f"attention {name!r} states that it takes {sizes}; wanted sizes above 0 and types of {DTYPES}")


def _c0(name: str, says: str, check: Callable[[Trial], None], *mutants: object) -> Law:
    return Law(name=name, level="C0", says=says, check=check, mutants=mutants)  # pyright: ignore[reportArgumentType]


LAWS: tuple[Law, ...] = (
    _c0("refs_resolve", "Everything that the declaration names is there.", refs_resolve, broken.NAMES_NOTHING),
    _c0(
        "probe_is_light",
        "The probe imports the standard library and its own package only, and opens no device node.",
        probe_is_light,
        broken.HEAVY_PROBE,
        broken.OPENS_NODE,
    ),
    _c0(
        "four_facts",
        "The probe gives four facts with evidence and remedies, and never raises.",
        four_facts,
        broken.RAISING_PROBE,
        broken.SILENT_PROBE,
        broken.LYING_PROBE,
    ),
    _c0(
        "devices_are_listed",
        "The probe numbers its devices from 0, with names and sizes that can be, "
        "and lists none where it sees no hardware.",
        devices_are_listed,
        broken.MISNUMBERED,
        broken.LISTS_ABSENT,
        broken.NO_MEMORY,
    ),
    _c0(
        "facts_of_the_number",
        "The facts of a number are those of the device of that number.",
        facts_of_the_number,
        broken.ALWAYS_THE_FIRST,
    ),
    _c0(
        "imports_touch_no_device",
        "Everything that the declaration names imports where there is no device, and the facts are told there.",
        imports_touch_no_device,
        broken.ASKS_AT_IMPORT,
        broken.ASKS_FOR_FACTS,
    ),
    _c0(
        "order_checks",
        "Every need of the bring-up is met by an earlier step.",
        order_checks,
        broken.WRONG_ORDER,
        broken.EXPORTS_NOTHING,
    ),
    Law(
        name="reversed_order_fails",
        level="C0",
        says="Pools, what is swapped in, attention and runner are made in this order, "
        "and another one is refused by name.",
        check=reversed_order_fails,
        mutants=(broken.FINDS_POOLS_LATER, broken.FINDS_ROWS_LATER),
        needs=TORCH,
    ),
    _c0(
        "order_is_written_down",
        "The printed bring-up is the text that the package keeps.",
        order_is_written_down,
        broken.UNWRITTEN_STEP,
    ),
    _c0("facts_agree", "The facts agree with each other and with what is offered.", facts_agree, *broken.WRONG_FACTS),
    _c0(
        "api_holds",
        "What the package names can be called as its API number says.",
        api_holds,
        broken.BLIND_PROBE,
        broken.HALF_ATTENTION,
        broken.BOASTS,
    ),
)
