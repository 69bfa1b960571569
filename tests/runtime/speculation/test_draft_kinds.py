"""The kinds of drafts as data: every entry names what it says, and help texts name every kind."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.draft_kinds import DRAFT_KINDS, MODELS
from sglcore.config.engine_config import EngineConfig
from sglcore.device.package import resolve
from sglcore.models.drafts.draft_checkpoint import DraftCheckpoint
from sglcore.models.drafts.draft_config import BY_TENSORS, checkpoint_of, draft_classes
from sglcore.runtime.attention.contract import AttentionFacts
from sglcore.runtime.speculative.draft_steps import KindSteps, LookupSteps
from sglcore.runtime.speculative.make_worker import _against_overlap
from sglcore.runtime.speculative.speculation_choice import Speculation, model_steps, most_rows

TENSORS = {
    "eagle": ("fc.weight", "layers.0.self_attn.q_proj.weight"),
    "eagle3": ("fc.weight", "midlayer.hidden_norm.weight"),
    "dflash": ("fc.weight", "hidden_norm.weight"),
    "frozen-mtp": ("pre_projection.weight", "post_projection.weight"),
}
"""Names of tensors that only a draft of the kind has together."""


@pytest.mark.parametrize("name", DRAFT_KINDS)
def test_an_entry_names_how_its_drafts_run_and_how_they_lie_in_a_checkpoint(name: str) -> None:
    kind = DRAFT_KINDS[name]
    assert kind.name == name
    assert isinstance(resolve(kind.steps), KindSteps if kind.has_model else LookupSteps)
    if kind.checkpoint is not None:
        checkpoint = resolve(kind.checkpoint)
        assert isinstance(checkpoint, DraftCheckpoint) and resolve(checkpoint.model)
        assert draft_classes()[name] == checkpoint.model


@pytest.mark.parametrize("name", BY_TENSORS)
def test_the_names_of_tensors_tell_one_kind(name: str) -> None:
    assert [each for each in BY_TENSORS if checkpoint_of(each).is_in(TENSORS[name])] == [name]


def test_the_help_names_every_kind_and_those_that_draft_trees() -> None:
    texts = {item.name: item.metadata.get("help", "") for item in fields(EngineConfig)}
    assert all(name in texts["speculative"] for name in DRAFT_KINDS)
    assert all((name in texts["draft_width"]) == kind.takes_trees for name, kind in DRAFT_KINDS.items())


@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_a_forward_of_a_draft_has_rows_for_the_tokens_and_for_what_its_kind_adds(drafts: int) -> None:
    beyond = max(drafts - 1, 1)
    wanted = {
        "ngram": drafts + 1,
        "suffix": drafts + 1,
        "eagle": drafts + 1,
        "eagle3": drafts + 1,
        "standalone": drafts + 2,
        "mtp": drafts + 1 + beyond,
        "dflash": drafts + 1 + beyond,
        "frozen-mtp": drafts + 1 + beyond,
    }
    assert {name: most_rows(EngineConfig(speculative=name, draft_tokens=drafts)) for name in wanted} == wanted


def test_a_start_that_finds_its_draft_has_room_for_every_kind() -> None:
    most = max(most_rows(EngineConfig(speculative=name, draft_tokens=3)) for name in MODELS)
    assert most_rows(EngineConfig(speculative="auto", draft_tokens=3)) == most
    assert most_rows(EngineConfig(speculative="off")) == 1


def test_only_a_frozen_draft_writes_no_cells() -> None:
    assert [name for name in MODELS if not model_steps(name).writes_cells] == ["frozen-mtp"]


class Told:
    """An attention backend, by its facts."""

    def __init__(self, is_exact: bool) -> None:
        self.facts = AttentionFacts(needs_host_lengths=is_exact)


def runner(is_exact: bool) -> Any:
    """The parts of a runner that the choice reads; one attention of two decides."""
    parts = (Told(False), Told(is_exact))
    options = SimpleNamespace(needs_exact_lengths=is_exact)
    return SimpleNamespace(options=options, attn_backend=SimpleNamespace(parts=parts))


@pytest.mark.parametrize(
    ("target", "draft", "whose"),
    [(False, False, ""), (True, False, "the target's"), (False, True, "the draft's"), (True, True, "the target's")],
)
def test_steps_wait_if_the_target_or_the_draft_needs_exact_lengths(target: bool, draft: bool, whose: str) -> None:
    reason = _against_overlap(Speculation("eagle", (3,)), runner(target), runner(draft))
    assert reason.startswith(f"{whose} Told needs exact lengths" if whose else "") and bool(reason) == bool(whose)
