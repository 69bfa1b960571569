"""Tests which speculative settings a start accepts, and which it refuses by name before it reads a
model or its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from devices.mlx.tests.parity import write_tiny
from devices.mlx.tests.running import bring_up, running
from sglcore.config.engine_config import EngineConfig
from sglcore.config.settings import settings_of
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.engine.start import embedded_model
from sglcore.step.tree_shapes import TreeShape
from sglcore_mlx.speculative.choice import GAPS, NGRAM, RULES, SERVED, SUFFIX, choose_speculation


def chosen(folder: Path | None = None, **settings: Any) -> tuple[Any, Row]:
    ledger = DecisionLedger()
    found = choose_speculation(EngineConfig(**settings), folder or embedded_model(), ledger)
    (row,) = (row for row in ledger.rows if row.topic == "speculative")
    return found, row


def test_each_of_several_mtp_layers_drafts_one_token() -> None:
    ledger = DecisionLedger()
    config = EngineConfig(draft_model="mtp-layers", draft_tokens=3)
    found = choose_speculation(config, embedded_model(), ledger)
    assert found is not None and found.lengths == (3,)
    (row,) = (row for row in ledger.rows if row.topic == "draft tokens")
    assert (row.effective, row.reason) == ("3", "each of the draft's 3 layers drafts one token per step")
    with pytest.raises(ConfigError, match="has 4 layers that predict one token each"):
        chosen(draft_model="mtp-layers", draft_tokens=5)


def test_every_kind_and_rule_of_the_core_is_served_or_a_gap_with_its_reason() -> None:
    assert set(settings_of(EngineConfig)["speculative"].choices) == {"auto", "off", *SERVED, *GAPS}
    assert set(settings_of(EngineConfig)["speculative_verify"].choices) == set(RULES)
    assert not set(SERVED) & set(GAPS) and all(GAPS.values())


@pytest.mark.parametrize("kind", (NGRAM, SUFFIX, "eagle3", "mtp"))
def test_what_is_served_is_a_row_of_the_ledger(kind: str) -> None:
    found, row = chosen(speculative=kind)
    assert (found.kind, found.lengths, found.from_host) == (kind, (0, 1, 3, 4), kind == "suffix")
    assert (row.requested, row.effective) == (kind, f"{kind}, 0, 1, 3 or 4 tokens a step")
    found, row = chosen(speculative=kind, draft_tokens=6)
    assert (found.lengths, row.effective) == ((6,), f"{kind}, 6 tokens a step")
    assert (found.folder is None) is (kind in (NGRAM, SUFFIX))


def test_a_block_has_as_many_draft_tokens_as_fit_after_its_root() -> None:
    found, _ = chosen(speculative="dflash")
    assert found.lengths == (0, 1, 3, 4) and found.folder == embedded_model() / "dflash"
    with pytest.raises(ConfigError, match="draft_tokens is 9, and a block of the draft has 7"):
        chosen(speculative="dflash", draft_tokens=9)


def test_a_draft_model_that_is_given_says_its_kind() -> None:
    for name, kind in (("draft", "eagle3"), ("mtp-layers", "mtp"), ("dflash", "dflash")):
        found, row = chosen(draft_model=name)
        assert (found.kind, found.folder.name) == (kind, name) and "a draft model was given" in row.reason


def test_a_draft_that_the_checkpoint_brings_is_named(tmp_path: Path) -> None:
    _, row = chosen()
    assert row.reason.startswith("this checkpoint has a draft (eagle3)")
    found, row = chosen(write_tiny(tmp_path / "tiny"))
    assert found is None and row.reason == "this checkpoint has no draft model"


def test_a_draft_that_is_not_there_or_does_not_fit_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="speculative is 'eagle3', and this checkpoint has no such draft"):
        chosen(folder, speculative="eagle3")
    with pytest.raises(ConfigError, match="there is no folder 'somewhere'"):
        chosen(draft_model="somewhere")
    with pytest.raises(ConfigError, match=r"vocab_size = 2147; wanted 97, the model's"):
        bring_up(folder, speculative="standalone", draft_model=str(embedded_model()))
    hybrid = write_tiny(tmp_path / "hybrid", hybrid=True)
    with pytest.raises(ConfigError, match="the draft keeps a state of each request"):
        bring_up(folder, speculative="standalone", draft_model=str(hybrid))


def test_auto_tries_the_draft_that_the_checkpoint_brings() -> None:
    ledger = DecisionLedger()
    found = choose_speculation(EngineConfig(speculative="auto"), embedded_model(), ledger)
    assert found is not None and (found.kind, found.is_tried) == ("eagle3", True) and not ledger.rows
    found, row = chosen(speculative="auto", prompt_slices="auto")
    assert found is None and "prompts run in slices of layers" in row.reason


@pytest.mark.parametrize("asked", [None, "auto", "off"])
def test_nothing_is_proposed_where_no_kind_is_asked_for(asked: str | None, tmp_path: Path) -> None:
    found, row = chosen(write_tiny(tmp_path / "tiny"), speculative=asked)
    assert found is None and (row.requested, row.effective) == (asked or "not asked", "off")
    assert "--speculative ngram" in row.remedy


@pytest.mark.parametrize("kind", GAPS)
def test_a_gap_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative is '{kind}', but {GAPS[kind]}; wanted one of ngram, suffix"):
        chosen(speculative=kind)


@pytest.mark.parametrize("rule", RULES[1:])
def test_under_another_rule_the_number_of_draft_tokens_is_fixed(rule: str) -> None:
    found, row = chosen(speculative="eagle3", speculative_verify=rule)
    assert (found.rule, found.lengths) == (rule, (4,))
    assert row.reason == f"requested; with {rule}, the distribution of texts is the same, not each token"
    assert found.draft_probs_bytes(3, 100) == 4 * 3 * 4 * 100
    assert chosen(speculative="ngram", speculative_verify=rule)[0].draft_probs_bytes(3, 100) == 0
    with pytest.raises(ConfigError, match=f"the rule is '{rule}', and these accept only chains"):
        chosen(speculative="eagle3", speculative_verify=rule, draft_width=2)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_tree_is_a_row_of_the_ledger_and_has_one_number_of_tokens(kind: str) -> None:
    found, row = chosen(speculative=kind, draft_width=3, draft_tokens=8)
    assert (found.tree, found.lengths) == (TreeShape(3, 5, 9), (8,))
    assert row.effective == f"{kind}, trees of 8 tokens a step, 3 beams 5 deep"


def test_a_tree_is_refused_for_a_model_that_can_not_mask_branches(tmp_path: Path) -> None:
    hybrid = write_tiny(tmp_path / "hybrid", hybrid=True)
    draft = write_tiny(tmp_path / "draft")
    with pytest.raises(ConfigError, match="draft_width is 2, but this model has a state of each request"):
        bring_up(hybrid, speculative="standalone", draft_model=str(draft), draft_width=2)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"speculative": "ngram", "draft_model": "somewhere"}, "a draft model is given, but speculative is 'ngram'"),
        ({"speculative": "ngram", "draft_width": 2}, "draft_width is 2, and drafts of 'ngram' are chains"),
        ({"speculative": "ngram", "draft_depth": 3}, "draft_depth applies to trees, and draft_width is 1"),
        ({"draft_width": 2}, "draft_width is 2, and speculative is 'not asked', which drafts no tokens"),
        (
            {"speculative": "eagle3", "draft_width": 2, "draft_tokens": 32},
            "a tree that is 5 deep has 5 to 31 tokens, and 32 are requested",
        ),
        ({"speculative": "suffix", "prefix_cache": False}, "the prefix cache is off, and draft tokens come from it"),
    ],
)
def test_what_can_not_be_is_refused_before_a_model_is_read(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        chosen(**asked)
    with pytest.raises(ConfigError, match=reason):
        bring_up(Path("/nowhere"), **asked)


def test_a_model_that_embeds_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaModel"], "pooling": "last"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="speculative is 'ngram', but this model embeds"):
        bring_up(folder, speculative="ngram", task="embed")


def test_prompts_come_whole_beside_proposals() -> None:
    ledger = DecisionLedger()
    with running(ledger=ledger, speculative="ngram", prompt_slices="auto") as built:
        limits = built["worker"].limits
        assert (limits.sliced_layers, limits.draft_tokens, limits.keeps_history) == (0, 4, True)
        assert not limits.allows_mixed_batches and limits.can_overlap
    row = next(row for row in ledger.rows if row.topic == "prompt slices")
    assert row.effective == "off" and "with speculation" in row.reason
