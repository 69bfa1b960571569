"""Which attention backend runs: the one requested, or else the first candidate that supports the
model."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.device.package import API, DevicePackage
from sglcore.runtime.attention.backend_selection import (
    AttentionNeeds,
    choose_attention,
    refusal,
    select_attention,
    shape_of,
)
from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionShape
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.attention.sparse.latent import DeepseekSparseAttnBackend
from sglcore.runtime.memory.kv_rows import ROWS, KeptRows, RowCounts, RowPool
from sglcore.runtime.memory.pools import CELL_MAJOR, PAGE_MAJOR
from tests.attention.rows import make_case

NEEDS = AttentionNeeds(head_dims=(64, 128), page_size=16, dtype="bfloat16", features=frozenset({"sliding_window"}))


class Wide(ReferenceAttention):
    """Supports everything that these tests need."""

    facts = AttentionFacts(features=frozenset({"sliding_window", "capture"}))


class LargePages(ReferenceAttention):
    """Supports pages of 64 tokens only."""

    facts = AttentionFacts(page_sizes=(64,), features=frozenset({"sliding_window"}))


class Plain(ReferenceAttention):
    """Supports no sliding windows."""

    facts = AttentionFacts()


def refs(*names: str) -> dict[str, str]:
    """Candidates from this file, in this order."""
    return {name: f"{__name__}:{name}" for name in names}


def choose(
    candidates: Mapping[str, str], explicit: str | None = None, needs: AttentionNeeds = NEEDS
) -> tuple[Any, Any]:
    """Return the chosen class and the ledger's rows."""
    ledger = DecisionLedger()
    return select_attention(candidates, needs, explicit, "toy", ledger), ledger.rows


def test_the_first_candidate_that_serves_the_model_is_taken() -> None:
    assert choose(refs("Wide", "ReferenceAttention"))[0] is Wide
    assert choose(refs("ReferenceAttention", "Wide"))[0] is ReferenceAttention


def test_the_ledger_says_what_was_refused_before_and_why() -> None:
    backend, rows = choose(refs("LargePages", "Plain", "Wide"))
    assert backend is Wide
    assert [(row.topic, row.requested, row.effective, row.downgrade) for row in rows] == [
        ("attention", "auto", "Wide", False)
    ]
    assert rows[0].reason == (
        "first that serves the model; LargePages refused: pages of 16 tokens; it takes 64; "
        "Plain refused: it lacks sliding_window"
    )
    assert "--attention-backend" in rows[0].remedy


def test_an_explicit_choice_is_taken_though_it_is_not_the_first() -> None:
    backend, rows = choose(refs("ReferenceAttention", "Wide"), "Wide")
    assert backend is Wide
    assert [(row.requested, row.effective, row.reason) for row in rows] == [
        ("Wide", "Wide", "requested; serves the model")
    ]


def test_an_explicit_choice_that_does_not_serve_is_an_error_not_a_replacement() -> None:
    ledger = DecisionLedger()
    with pytest.raises(ConfigError, match="no attention backend of device 'toy' .* LargePages refused: pages of 16"):
        select_attention(refs("LargePages", "Wide"), NEEDS, "LargePages", "toy", ledger)
    assert ledger.rows == ()


def test_an_unknown_choice_is_an_error_that_lists_what_is_offered() -> None:
    with pytest.raises(ConfigError, match="'flash' is not offered by device 'toy'; wanted one of LargePages, Wide"):
        choose(refs("LargePages", "Wide"), "flash")


def test_no_candidate_is_an_error_with_every_reason_and_a_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(refs("LargePages", "Plain"))
    text = str(caught.value)
    assert "LargePages refused: pages of 16 tokens" in text
    assert "Plain refused: it lacks sliding_window" in text
    assert "choose another --attention-backend" in text


@pytest.fixture
def broken_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that fail to import, for different reasons."""
    sources = {"needs_library": "import a_library_that_nobody_has", "raises": "raise RuntimeError('driver too old')"}
    for name, text in sources.items():
        (tmp_path / f"attention_{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("broken_modules")
def test_a_candidate_whose_library_is_missing_is_refused_with_the_import_error() -> None:
    candidates = {"fast": "attention_needs_library:Fast", **refs("Wide")}
    backend, rows = choose(candidates)
    assert backend is Wide
    assert "fast refused: No module named 'a_library_that_nobody_has'; install the library it needs" in rows[0].reason
    with pytest.raises(ConfigError, match="fast refused: No module named 'a_library_that_nobody_has'"):
        choose(candidates, "fast")


@pytest.mark.usefixtures("broken_modules")
def test_a_candidate_whose_library_fails_on_import_is_refused_with_its_error() -> None:
    backend, rows = choose({"fast": "attention_raises:Fast", **refs("Wide")})
    assert backend is Wide and "fast refused: RuntimeError: driver too old; its library does not fit" in rows[0].reason
    with pytest.raises(ConfigError, match="fast refused: RuntimeError: driver too old"):
        choose({"fast": "attention_raises:Fast"}, "fast")


class Restless(Wide):
    """Its library fails when it is asked for the device."""

    @classmethod
    def unavailable(cls) -> str:
        raise AttributeError("module 'fast' has no attribute 'capability'")


class Borrowed(Wide):
    facts = replace(Wide.facts, library="a library")


def test_a_candidate_that_cannot_say_whether_it_runs_is_refused() -> None:
    backend, rows = choose(refs("Restless", "Wide"))
    assert backend is Wide and "Restless refused: AttributeError: module 'fast' has no attribute" in rows[0].reason


@pytest.mark.parametrize(("failure", "chosen"), [("", Borrowed), ("its first call failed", Wide)])
def test_only_a_candidate_that_calls_a_library_is_tried(failure: str, chosen: type[AttentionBackend]) -> None:
    tried = list[type[AttentionBackend]]()

    def trial(backend: type[AttentionBackend]) -> str:
        tried.append(backend)
        return failure

    ledger = DecisionLedger()
    assert select_attention(refs("Borrowed", "Wide"), NEEDS, None, "toy", ledger, tried=trial) is chosen
    assert tried == [Borrowed]
    assert (f"Borrowed refused: {failure}" in ledger.rows[0].reason) == bool(failure)


@pytest.mark.parametrize("ref", ["attention_nowhere:Fast", f"{__name__}:Nothing"])
def test_a_reference_to_nothing_is_the_packages_error_not_a_refusal(ref: str) -> None:
    with pytest.raises(DeviceError, match="device package 'toy' refers to"):
        choose({"fast": ref, **refs("Wide")})


class Exact(Wide):
    facts = replace(Wide.facts, takes_bounds=False)


def test_what_takes_exact_lengths_alone_is_refused_where_draft_tokens_are_verified() -> None:
    assert choose(refs("Exact", "Wide"))[0] is Exact
    backend, rows = choose(refs("Exact", "Wide"), needs=replace(NEEDS, verifies=True))
    assert backend is Wide and "Exact refused: upper bounds of lengths on the host" in rows[0].reason
    with pytest.raises(ConfigError, match="Exact refused: upper bounds of lengths on the host"):
        choose(refs("Exact", "Wide"), "Exact", replace(NEEDS, verifies=True))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (AttentionFacts(features=NEEDS.features), ""),
        (AttentionFacts(page_sizes=(1, 16), head_dims=(64, 128), dtypes=("bfloat16",), features=NEEDS.features), ""),
        (AttentionFacts(page_sizes=(1, 64), features=NEEDS.features), "pages of 16 tokens; it takes 1, 64"),
        (AttentionFacts(page_sizes=(), features=NEEDS.features), "pages of 16 tokens; it takes "),
        (AttentionFacts(head_dims=(64, 256), features=NEEDS.features), "heads of 128; it takes 64, 256"),
        (AttentionFacts(dtypes=("float16",), features=NEEDS.features), "dtype bfloat16; it takes float16"),
        (AttentionFacts(features=frozenset({"encoder"})), "it lacks sliding_window"),
        (AttentionFacts(layouts=(PAGE_MAJOR, CELL_MAJOR), features=NEEDS.features), ""),
        (AttentionFacts(layouts=None, features=NEEDS.features), ""),
        (
            AttentionFacts(layouts=(PAGE_MAJOR, "other"), features=NEEDS.features),
            "keys and values laid out cell_major; it takes page_major, other",
        ),
    ],
)
def test_a_refusal_names_what_is_missing_and_what_there_is(facts: AttentionFacts, reason: str) -> None:
    assert refusal(facts, NEEDS) == reason


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sliding_window": 4}, {"sliding_window"}),
        ({"softcap": 30.0}, {"softcap"}),
        ({"sinks": torch.zeros(4)}, {"sinks"}),
        ({"is_frozen": True}, {"frozen"}),
        ({"causal": False, "cached": False}, {"encoder"}),
        ({}, set()),
    ],
)
def test_what_a_layer_asks_for_is_what_a_backend_must_name(asked: dict[str, Any], named: set[str]) -> None:
    assert Attention(0, 4, 2, 8, **asked).features == named


class OwnRows(ReferenceAttention):
    """Reads row pools, for layers with latent attention."""

    facts = AttentionFacts(layouts=(ROWS,), features=frozenset({"latent"}))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (refs("Wide"), DeepseekSparseAttnBackend),
        (refs("OwnRows"), OwnRows),
        ({"latent": f"{__name__}:OwnRows"}, OwnRows),
    ],
)
def test_rows_are_read_by_a_packages_own_backend_before_the_cores(own: dict[str, str], wanted: type) -> None:
    """Holds for any name of the backend."""
    parts: Any = dict.fromkeys(("probe", "facts", "worker", "bring_up"), "toy:part")
    kernels = {"own": "toy:kernels"}
    package = DevicePackage(name="toy", api=API, summary="", attention=own, graphs={}, kernels=kernels, **parts)
    shape = AttentionShape(1, ((1, 8),), (None,), False, frozenset({"latent"}))
    pool = RowPool([{"latent": KeptRows(8, torch.float32)}], 16, RowCounts(1), "cpu")
    given = EngineConfig(), package, Facts("cpu"), "float32", shape, pool, "the model", DecisionLedger()
    assert choose_attention(*given) is wanted


def test_a_library_that_fails_only_in_a_capture_is_taken_without_graphs() -> None:
    """Holds if nothing else serves; an explicit kind of graph is not given up."""
    parts: Any = dict.fromkeys(("probe", "facts", "worker", "bring_up"), "toy:part")
    own = {"attention": refs("Borrowed"), "graphs": {}, "kernels": {"own": "toy:kernels"}}
    package = DevicePackage(name="toy", api=API, summary="", **own, **parts)
    facts, tried = Facts("cpu", has_streams=True, default_graph="full"), list[bool]()
    shape, pool = AttentionShape(1, ((1, 8),)), make_case([(0, 1)]).backend.token_to_kv_pool

    def trial(backend: type[AttentionBackend], captured: bool) -> str:
        tried.append(captured)
        return "its capture failed" if captured else ""

    def chosen(graph: str) -> type[AttentionBackend]:
        given = EngineConfig(graph=graph), package, facts, "float32", shape, pool, "the model", DecisionLedger(), trial
        return choose_attention(*given)

    assert chosen("auto") is Borrowed
    assert tried == [True, False]
    with pytest.raises(ConfigError, match="Borrowed refused: its capture failed"):
        chosen("full")


class ByPage(ReferenceAttention):
    """Reads page-major pools only."""

    facts = AttentionFacts(layouts=(PAGE_MAJOR,))


def test_a_shape_names_all_that_occurs_in_its_layers() -> None:
    layers = [Attention(0, 8, 2, 64, sliding_window=9, softcap=30.0), Attention(1, 4, 4, 32), Attention(2, 8, 2, 64)]
    found = shape_of(layers, is_encoder=False)
    assert (found.num_heads, found.layers) == (8, ((2, 64), (4, 32), (2, 64)))
    assert (found.windows, found.softcaps) == ((9, None), (30.0, None))
    assert found.features == {"sliding_window", "softcap"}


def test_a_backend_over_a_pool_that_its_facts_do_not_name_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"ByPage was given keys and values laid out cell_major.*one of page_major"):
        make_case([(3, 1)], kind=ByPage)


def select_by_name(candidates: Mapping[str, str], explicit: str | None) -> str:
    """Mutant: takes the first backend that works if the requested one does not."""
    try:
        return choose(candidates, explicit)[0].__name__
    except ConfigError:
        return choose(candidates)[0].__name__


def test_a_selection_that_falls_back_is_caught() -> None:
    assert select_by_name(refs("LargePages", "Wide"), "LargePages") == "Wide"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (AttentionFacts(index_dtype="int32", features=NEEDS.features), "int64; it takes int32"),
        (AttentionFacts(padding_len=0, features=NEEDS.features), "length 1; it wants 0"),
        (AttentionFacts(index_dtype="int64", features=NEEDS.features), ""),
    ],
)
def test_index_types_and_padding_lengths_are_read(facts: AttentionFacts, reason: str) -> None:
    assert refusal(facts, NEEDS).endswith(reason) and bool(refusal(facts, NEEDS)) == bool(reason)


@pytest.mark.parametrize(
    ("stored", "reason"), [(True, ""), (False, "queries alone; it takes them with keys and values")]
)
def test_layers_of_queries_alone_ask_for_a_backend_that_reads_cells(stored: bool, reason: str) -> None:
    facts = AttentionFacts(features=NEEDS.features, takes_stored=stored)
    assert refusal(facts, replace(NEEDS, features=NEEDS.features | {"frozen"})) == reason
