"""Every fact of a device has a reader in the core, a law that checks it, and a mutant that
misstates it and is caught."""

from __future__ import annotations

import ast
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.fact_proofs import PROOFS
from sglcore.conformance.law import LawBroken
from sglcore.conformance.laws import laws_facts
from sglcore.conformance.laws.laws_facts import Watch
from sglcore.device.facts import Facts

NAMES = [item.name for item in fields(Facts)]
GUIDE = Path(__file__).parents[2] / "docs" / "add-a-device.md"


def test_each_fact_has_a_proof_and_no_other_name_has_one() -> None:
    assert list(PROOFS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_fact_is_read_held_and_lied_about(name: str) -> None:
    proof = PROOFS[name]
    spec = find_spec(proof.reader)
    assert spec is not None and spec.origin is not None
    read = {node.attr for node in ast.walk(ast.parse(Path(spec.origin).read_text())) if isinstance(node, ast.Attribute)}
    assert name in read or (name == "default_graph" and "graph_kind" in read), f"{proof.reader} does not read {name}"
    law = next(law for law in LAWS if law.name == proof.law)
    assert proof.mutant in law.mutants


def test_the_guide_explains_each_fact_in_one_row() -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    told = {line.split("`")[1]: line for line in rows}
    assert [name for name in told if name in NAMES] == NAMES
    for name in NAMES:
        assert f"`{PROOFS[name].law}`" in told[name]
        assert f"`{PROOFS[name].reader.removeprefix('sglcore.').replace('.', '/')}.py`" in told[name]


def index_is_refused() -> bool:
    """Whether `Watch` sees an int64 index that an operation takes in a list and does not return."""
    x, index = torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    try:
        with Watch("cpu"):
            x[index]
    except LawBroken as error:
        return "index receives torch.int64" in str(error)
    return False


def test_indices_in_a_list_are_seen_and_who_does_not_look_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert index_is_refused()
    monkeypatch.setattr(laws_facts, "_tensors", lambda values: [v for v in values if isinstance(v, torch.Tensor)])
    assert not index_is_refused()
