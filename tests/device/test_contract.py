"""The contract for device packages, compared with two stored texts so that every change is
reviewed.

`contract.txt` is the current contract. Write an intended change with `python -m
tests.device.test_contract`. `apiN/contract.txt` is the contract at the freeze of number N, and
never changes. While N is current the contract may only grow: a change that would break a package
needs a new number, by the steps of docs/add-a-device.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sglcore.conformance.target import GIVEN
from sglcore.device import bring_up, facts, package, pci, probe, system
from sglcore.runtime.attention import contract
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.graphs import capture, graph_backend
from sglcore.runtime.kernels import table
from sglcore.runtime.overlap import parts
from sglcore.worker import model_worker, schedule_batch, topology
from tests.device.promises import ABSTRACT, LIST, OLDER, breaks, moved_modules

STORED = Path(__file__).with_name("contract.txt")
RECORDS = (
    package.DevicePackage,
    topology.Communication,
    facts.Facts,
    probe.Fact,
    probe.ProbeReport,
    probe.DeviceInfo,
    pci.PciDevice,
    pci.PciClaim,
    model_worker.Limits,
    model_worker.Ticket,
    model_worker.TokenLogprobs,
    model_worker.BatchResult,
    schedule_batch.ScheduleBatch,
    contract.AttentionFacts,
    contract.AttentionShape,
    contract.Bucket,
    contract.AttentionPlan,
    parts.Partition,
)
PROTOCOLS = (
    model_worker.ModelWorker,
    system.System,
    contract.AttentionBackend,
    graph_backend.GraphBackend,
    graph_backend.CapturedStep,
    graph_backend.PromptBackend,
    graph_backend.CapturedPrompt,
    capture.StreamCapture,
    capture.Segment,
    bring_up.BringUp,
)
TEMPLATES = Path(inspect.getfile(package)).parents[1] / "conformance"
IMPORT = re.compile(r"^ *from (sglcore\.[\w.]+) import ([\w, ]+)$", re.MULTILINE)
ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(moved_modules())
KERNELS = table.KernelTable.declared()
CONSTRUCTORS = ((contract.AttentionBackend, "__init__"),)
"""Constructors that the core calls."""


def describe() -> str:
    """Return the API number, fields with types and defaults, and methods with signatures."""
    lines: list[str] = []
    for record in RECORDS:
        lines.append(f"\n{record.__name__}" if lines else f"{record.__name__}, API {package.API}")
        lines += [f"    {field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(record)]
    lines.append("\nKernelTable")
    lines += [f"    {name}{inspect.signature(entry.reference)}{_terms(entry)}" for name, entry in KERNELS.items()]
    for protocol in PROTOCOLS:
        lines.append(f"\n{protocol.__name__}")
        for name, member in sorted(vars(protocol).items()):
            if isinstance(member, property):
                lines.append(f"    {name}: property")
            elif inspect.isfunction(member) and (not name.startswith("_") or (protocol, name) in CONSTRUCTORS):
                is_abstract = protocol is contract.AttentionBackend and name in protocol.__abstractmethods__
                lines.append(f"    {name}{inspect.signature(member)}{ABSTRACT * is_abstract}")
    lines.append("\nThe standard bring-up")
    lines.append(f"    {LIST}{', '.join((*GIVEN, *(step.provides for step in STANDARD.steps)))}")
    lines += ["\nImported by what `sglcore new-device` writes", *(f"    {line}" for line in _imports())]
    return "\n".join(lines) + "\n"


def _imports() -> Iterator[str]:
    """Yield the names that every new package imports; functions and classes that it calls come with
    their parameters. Names from Triton modules come without, because Triton may not be
    installed."""
    texts = "".join(file.read_text() for file in TEMPLATES.glob("template*/**/*.in"))
    found = {
        (module, name.split(" as ")[0].strip()) for module, names in IMPORT.findall(texts) for name in names.split(",")
    }
    for module, name in sorted(found | set(_older_names(found))):
        member: Any = None if module.endswith(".triton") else getattr(import_module(module), name)
        is_told = member in (*RECORDS, *PROTOCOLS, table.KernelTable) or not callable(member)
        yield f"{module}:{name}{'' if is_told else inspect.signature(member)}"


def _older_names(found: Collection[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield imports of modules that moved, by the module's name at the freeze of the number."""
    for older, module in moved_modules().items():
        yield from ((older, name) for other, name in found if other == module)


def _terms(entry: table.Entry[Any]) -> str:
    words = {"rests on": entry.rests_on, "writes": entry.writes, "may write": entry.spoils}
    terms = [f"{word} {', '.join(names)}" for word, names in words.items() if names]
    return f" ({'; '.join(['optional'] * entry.is_optional + terms)})" if terms else ""


def _default(field: Any) -> str:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return " (optional)" if has_default else ""


def test_the_contract_is_the_stored_one() -> None:
    assert describe() == STORED.read_text(encoding="utf-8"), __doc__


def test_nothing_that_todays_number_promised_is_gone() -> None:
    frozen = STORED.parent / f"api{package.API}" / "contract.txt"
    assert breaks(frozen.read_text(encoding="utf-8"), describe()) == [], __doc__


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    facts: Ref\n", "    facts: Ref\n    reset: Ref\n"),
        ("    facts: Ref\n", ""),
        ("    facts: Ref\n", "    facts: str\n"),
        ("    page_size: int (optional)\n", "    page_size: int\n"),
        ("submit(self, batch: 'ScheduleBatch')", "submit(self, batch: 'ScheduleBatch', flag: 'bool' = False)"),
        ("    close(self) -> 'None'\n    kind:", "    close(self) -> 'None'\n    free(self) -> 'None'\n    kind:"),
        ("    generation: property\n", "    generation: property\n    memory(self) -> 'int' (abstract)\n"),
        ("    gelu(x: 'Tensor')", "    gelu(x: 'Tensor', out: 'Tensor')"),
        (", runner, ", ", "),
        ("triton_gap(compiler: 'str')", "triton_gap(compiler: 'str', version: 'str')"),
        ("    seq_lens: Ints\n", ""),
    ],
)
def test_what_an_older_package_could_not_have_or_would_miss_is_a_break(old: str, new: str) -> None:
    text = STORED.read_text(encoding="utf-8")
    assert old in text and len(breaks(text, text.replace(old, new, 1))) >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    facts: Ref\n", "    facts: Ref\n    reset: Ref | None (optional)\n"),
        ("    hardware: Fact\n", "    hardware: Fact (optional)\n"),
        ("    seq_lens: Ints\n", "    seq_lens: Ints\n    more: Ints\n"),
        ("\nKernelTable\n", "\nKernelTable\n    fused(x: 'Tensor') -> 'Tensor' (optional; rests on linear)\n"),
        (", runner, ", ", warm_up, runner, "),
        ("    generation: property\n", "    generation: property\n    memory(self) -> 'int'\n"),
        ("    read(self, path: 'str')", "    mounts(self) -> 'int'\n    read(self, path: 'str', limit: 'int' = 0)"),
        ("triton_gap(compiler: 'str')", "triton_gap(compiler: 'str', version: 'str' = '')"),
    ],
)
def test_what_an_older_package_need_not_know_is_none(old: str, new: str) -> None:
    text = STORED.read_text(encoding="utf-8")
    assert old in text and breaks(text, text.replace(old, new, 1)) == []


def test_each_file_names_one_module() -> None:
    assert len(NAMES) == len(list(OLDER.glob("[!_]*.py"))) > 0


@pytest.mark.parametrize("older", NAMES)
def test_the_older_name_gives_the_same_objects(older: str) -> None:
    before, now = import_module(older), import_module(moved_modules()[older])
    names = [name for name in vars(now) if not name.startswith("_")]
    assert names and [name for name in names if getattr(before, name, None) is not getattr(now, name)] == []


def test_an_error_raised_under_the_older_name_is_caught_under_the_new_one() -> None:
    program = (
        "from sglcore.device.errors import DeviceError\n"
        "from sglcore.core.errors import DeviceError as Now\n"
        "try: raise DeviceError('lost')\n"
        "except Now as error: print(type(error).__module__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "sglcore.core.errors\n"


def test_nothing_of_ours_uses_an_older_name() -> None:
    older = re.compile(rf"\b({'|'.join(map(re.escape, NAMES))})\b")
    files = [
        file
        for folder in ("sglcore", "devices", "simulator", "benchmarks", "tools")
        for kind in ("*.py", "*.in")
        for file in (ROOT / folder).rglob(kind)
    ]
    assert len(files) > 500
    assert [str(file) for file in files if older.search(file.read_text(encoding="utf-8"))] == []


if __name__ == "__main__":
    STORED.write_text(describe(), encoding="utf-8")
