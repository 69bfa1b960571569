"""Which drafters work together with which features: the document states the same as the data, and a
start refuses exactly these combinations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.draft_kinds import IN_TREES, MODELS, NO_PREFIX_CACHE, RANKS, SHARDS, WITHOUT_MODEL
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.speculative.refused_combinations import (
    ALL,
    CELLS,
    COMBINATIONS,
    DRAFT_RINGS,
    DRAFT_STATE,
    EMBEDS,
    HISTORY,
    HOST_ROWS,
    OTHER_RULES,
    OTHER_STATE,
    ROWS,
    STATE,
    TEXT,
    TREES,
    WINDOWS,
    reason_against,
)
from sglcore.runtime.speculative.speculation_choice import choose_speculation

PAGE = Path(__file__).resolve().parents[3] / "docs" / "speculation.md"
ELSEWHERE = (HOST_ROWS, TEXT)
"""Features that need a whole start; their own tests try them."""
KINDS = (*WITHOUT_MODEL, *MODELS)


def layer(window: int | None = None, rows: bool = False, ring: bool = False) -> Any:
    """A layer with the attributes that the choice reads."""
    kept = {"row": SimpleNamespace(ring=ring)} if rows or ring else {}
    return SimpleNamespace(sliding_window=window, rows=kept)


def layers_of(beside: str) -> tuple[Any, ...]:
    """The layers of a model with the feature `beside`."""
    return (layer(8 if beside == WINDOWS else None, rows=beside == ROWS),)


def choose(folder: Path, kind: str, beside: str, is_tree: bool) -> Any:
    """The speculation that a start chooses for a model or configuration with the feature
    `beside`."""
    taken_in = {STATE: ("numbers",), OTHER_STATE: ("numbers", None)}.get(beside, ())
    states = tuple(SimpleNamespace(taken_in=each) for each in taken_in)
    config = SimpleNamespace(is_encoder=beside == EMBEDS)
    model: Any = SimpleNamespace(
        config=config, state_layers=states, reads_history=beside == HISTORY, attention_layers=layers_of(beside)
    )
    own = SimpleNamespace(
        state_layers=("state",) if beside == DRAFT_STATE else (),
        attention_layers=(layer(ring=beside == DRAFT_RINGS),),
        config=SimpleNamespace(words={"block_size": 8}),
    )
    draft = SimpleNamespace(model=own, aux_layers=(), heads=1)
    (folder / "draft").mkdir(exist_ok=True)
    asked = EngineConfig(
        speculative=kind,
        draft_model=str(folder / "draft") if kind in MODELS else None,
        draft_width=2 if is_tree else 1,
        prefix_cache=beside != NO_PREFIX_CACHE,
        speculative_verify="rejection" if beside == OTHER_RULES else "coupled",
    )
    ranks: dict[str, Any] = {"is_divided": beside == RANKS, "in_shards": beside == SHARDS}
    return choose_speculation(asked, model, folder, DecisionLedger(), lambda *_: draft, **ranks)


def cases() -> Iterator[tuple[str, str, bool]]:
    """Every feature with every drafter kind that it can meet, and with trees for kinds that have
    them."""
    for beside in COMBINATIONS:
        for kind in KINDS:
            if beside in ELSEWHERE or (beside in (DRAFT_STATE, DRAFT_RINGS) and kind in WITHOUT_MODEL):
                continue
            yield beside, kind, False
            if kind in IN_TREES:
                yield beside, kind, True


@pytest.mark.parametrize(("beside", "kind", "is_tree"), list(cases()))
def test_a_start_refuses_what_the_data_refuse(beside: str, kind: str, is_tree: bool, tmp_path: Path) -> None:
    reasons = [reason for what in (kind, *([TREES] if is_tree else [])) if (reason := reason_against(beside, what))]
    if not reasons:
        assert choose(tmp_path, kind, beside, is_tree).kind == kind
        return
    with pytest.raises(ConfigError) as refused:
        choose(tmp_path, kind, beside, is_tree)
    assert any(reason in str(refused.value) for reason in reasons)


def test_something_goes_and_something_is_refused() -> None:
    assert not reason_against(CELLS, TREES)
    assert reason_against(STATE, TREES) and not reason_against(STATE, "mtp")
    assert reason_against(OTHER_STATE, TREES) == reason_against(OTHER_STATE, ALL)
    assert reason_against(RANKS, "dflash")
    assert not reason_against(RANKS, "mtp")


def test_the_page_says_it_as_the_data_do() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| together with | refused |") + 2
    found = lines[start : lines.index("", start)]
    wanted = []
    for each in COMBINATIONS.values():
        told = [
            why if what == ALL else f"{what}: {why}" if what == TREES else f"`{what}`: {why}"
            for what, why in each.refused.items()
        ]
        wanted.append(f"| {each.name} | {'; '.join(told) or 'nothing'} |")
    assert found == wanted
