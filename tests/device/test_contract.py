"""The contract that packages are written against, held against a stored text: a change is seen, and decided, in review.

When a difference is intended: if an old package would break, raise `API` in package.py; then write the text anew with
`python -m tests.device.test_contract`.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from sglcore.device import batch, facts, package, pci, probe, system, topology, worker
from sglcore.runtime.attention import contract
from sglcore.runtime.graphs import backend, capture
from sglcore.runtime.kernels import table
from sglcore.runtime.overlap import parts

STORED = Path(__file__).with_name("contract.txt")
RECORDS = (
    package.DevicePackage,
    facts.Facts,
    probe.Fact,
    probe.ProbeReport,
    probe.DeviceInfo,
    pci.PciDevice,
    pci.PciClaim,
    worker.Limits,
    worker.Ticket,
    worker.TokenLogprobs,
    worker.BatchResult,
    batch.ScheduleBatch,
    contract.AttentionFacts,
    contract.AttentionShape,
    contract.Bucket,
    contract.AttentionPlan,
    parts.Partition,
)
PROTOCOLS = (
    worker.ModelWorker,
    system.System,
    contract.AttentionBackend,
    backend.GraphBackend,
    backend.CapturedStep,
    backend.PromptBackend,
    backend.CapturedPrompt,
    capture.StreamCapture,
    capture.Segment,
)
KERNELS = table.KernelTable.declared()
INSIDE = {"Communication | None": topology.Communication}
"""Small records, told where they stand in another one."""
CONSTRUCTORS = ((contract.AttentionBackend, "__init__"),)
"""Constructors that the core calls."""


def describe() -> str:
    """API number, fields with types and defaults, methods with signatures."""
    lines: list[str] = []
    for record in RECORDS:
        lines.append(f"\n{record.__name__}" if lines else f"{record.__name__}, API {package.API}")
        lines += [f"    {field.name}: {_type(field)}{_default(field)}" for field in dataclasses.fields(record)]
    lines.append("\nKernelTable")
    lines += [f"    {name}{inspect.signature(entry.reference)}{_terms(entry)}" for name, entry in KERNELS.items()]
    for protocol in PROTOCOLS:
        lines.append(f"\n{protocol.__name__}")
        for name, member in sorted(vars(protocol).items()):
            if isinstance(member, property):
                lines.append(f"    {name}: property")
            elif inspect.isfunction(member) and (not name.startswith("_") or (protocol, name) in CONSTRUCTORS):
                lines.append(f"    {name}{inspect.signature(member)}")
    return "\n".join(lines) + "\n"


def _type(field: Any) -> str:
    inside = INSIDE.get(field.type)
    if inside is None:
        return field.type
    return f"{field.type} of {', '.join(f'{each.name}: {_type(each)}' for each in dataclasses.fields(inside))}"


def _terms(entry: table.Entry[Any]) -> str:
    words = {"rests on": entry.rests_on, "writes": entry.writes, "may write": entry.spoils}
    terms = [f"{word} {', '.join(names)}" for word, names in words.items() if names]
    return f" ({'; '.join(['optional'] * entry.is_optional + terms)})" if terms else ""


def _default(field: Any) -> str:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return " (optional)" if has_default else ""


def test_the_contract_is_the_stored_one() -> None:
    assert describe() == STORED.read_text(encoding="utf-8"), __doc__


def test_a_new_parameter_of_the_worker_would_be_seen() -> None:
    changed = describe().replace("submit(self, batch: 'ScheduleBatch')", "submit(self, batch: 'ScheduleBatch', flag)")
    assert changed != STORED.read_text(encoding="utf-8")


if __name__ == "__main__":
    STORED.write_text(describe(), encoding="utf-8")
