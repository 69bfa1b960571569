"""Speculation on several ranks: every rank proposes and verifies the same draft tokens; tokens and
acceptance counts equal one rank's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from tests.checkpoints import llama, qwen3_next, save
from tests.deepseek_v4 import deepseek_v4, with_published_names
from tests.drafts import TARGET, eagle, eagle3, next_token, next_tokens
from tests.latent import deepseek_v3
from tests.laws.engine import TokenEngine, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

Make = Callable[[Path], dict[str, Any]]
"""Writes a model, and a draft model if there is one; returns the settings."""


def of_ngrams(folder: Path) -> dict[str, Any]:
    save(llama(**TARGET), folder)
    return {"speculative": "ngram"}


def of_eagle(folder: Path) -> dict[str, Any]:
    target = llama(**TARGET)
    save(target, folder)
    eagle(target, folder / "draft")
    return {"speculative": "eagle"}


def of_eagle3(folder: Path) -> dict[str, Any]:
    target = llama(**TARGET)
    save(target, folder)
    eagle3(target, folder / "draft")
    return {"speculative": "eagle3"}


def of_next_token(folder: Path) -> dict[str, Any]:
    next_token(llama(**TARGET), folder, llama)
    return {"speculative": "mtp"}


def of_several(folder: Path) -> dict[str, Any]:
    next_tokens(llama(**TARGET), folder, llama, 3)
    return {"speculative": "mtp"}


def of_latent(folder: Path) -> dict[str, Any]:
    next_token(deepseek_v3(), folder, deepseek_v3, first_k_dense_replace=0)
    return {"speculative": "mtp"}


def of_streams(folder: Path) -> dict[str, Any]:
    with_published_names(deepseek_v4(), folder)
    return {"speculative": "mtp", "page_size": 16}


def of_states(folder: Path) -> dict[str, Any]:
    next_token(qwen3_next(), folder, qwen3_next, "qwen", layer_types=["full_attention"], mlp_only_layers=[])
    return {"speculative": "mtp"}


def of_another(folder: Path) -> dict[str, Any]:
    save(llama(**TARGET), folder)
    return {"draft_model": str(save(llama(seed=1), folder / "small")), "speculative": "standalone"}


def by_rule(rule: str) -> Make:
    """With an acceptance rule that draws coins."""
    return lambda folder: {**of_eagle(folder), "speculative_verify": rule}


def in_trees(make: Make) -> Make:
    """With draft trees: all ranks must keep the same nodes."""
    return lambda folder: {**make(folder), "draft_width": 3, "draft_depth": 3, "draft_tokens": 7}


KINDS: MappingProxyType[str, tuple[Make, int]] = MappingProxyType(
    {
        "ngram": (of_ngrams, 4),
        "eagle": (of_eagle, 2),
        "eagle3, with an output layer of its own": (of_eagle3, 4),
        "mtp": (of_next_token, 2),
        "mtp, by several layers": (of_several, 2),
        "mtp, over latent rows": (of_latent, 2),
        "mtp, over streams": (of_streams, 2),
        "mtp, of a model with states": (of_states, 2),
        "a model of its own": (of_another, 2),
        "eagle, by rejection": (by_rule("rejection"), 2),
        "eagle, by the block": (by_rule("block"), 2),
        "eagle, in trees": (in_trees(of_eagle), 2),
        "eagle3, in trees": (in_trees(of_eagle3), 2),
        "a model of its own, in trees": (in_trees(of_another), 2),
    }
)
SIZES: MappingProxyType[str, Any] = MappingProxyType({"max_batch_tokens": 16, "draft_tokens": 3})
Found = tuple[list[list[int]], dict[Any, int]]


def run(engine: TokenEngine) -> Found:
    """Tokens, greedy and sampled, of prompts in chunks that arrive one after the other; and the
    draft counts."""
    prompts = random_prompts(5, (21, 6, 30))
    drawn = engine.run(prompts, 24, temperature=1.5, seed=11, stagger=2)
    greedy = engine.run(prompts, 12)
    few = engine.run(prompts, 20, logit_bias={5: 30.0, 9: 30.0, 11: 30.0})  # texts that repeat themselves
    return [each.tokens for each in (*drawn, *greedy, *few)], dict(engine.scheduler.drafts)


def alone(folder: Path, **settings: Any) -> Found:
    """The same on one rank."""
    engine = TokenEngine(folder, **SIZES | settings)
    found = run(engine)
    engine.worker.close()
    return found


def on_ranks(folder: Path, width: int, defect: Any = None, **settings: Any) -> Found:
    given: dict[str, Any] = {"tp": width, **SIZES, **settings}
    with RankedEngine(folder, defect, **given) as engine:  # pyright: ignore[reportArgumentType]
        return run(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_what_was_accepted_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    make, width = KINDS[kind]
    settings = make(tmp_path)
    texts, drafts = alone(tmp_path, **settings)
    assert on_ranks(tmp_path, width, **settings) == (texts, drafts)
    assert sum(accepted * count for (*_, accepted), count in drafts.items()) > 5


@pytest.mark.parametrize(
    ("defect", "make"),
    [
        (defects.own_proposals, of_eagle),
        (defects.own_acceptance, by_rule("rejection")),
        (defects.own_history, of_ngrams),
        (defects.own_ranking, in_trees(of_eagle)),
    ],
)
def test_a_rank_that_decides_for_itself_is_caught(defect: Any, make: Make, tmp_path: Path) -> None:
    settings = make(tmp_path)
    wanted = alone(tmp_path, **settings)
    with pytest.raises((AssertionError, WorkerLost)):
        assert on_ranks(tmp_path, 2, defect, **settings) == wanted


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_masks_penalties_and_biases_are_applied_by_the_rank_that_draws(speculative: str, tmp_path: Path) -> None:
    save(llama(**TARGET), tmp_path)
    prompts = random_prompts(7, (9, 14, 4))
    given: dict[str, Any] = {
        "grammars": (3, None, 8),
        "temperature": 0.9,
        "seed": 5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.5, 9: -100.0},
        "min_p": 0.02,
        "stagger": 1,
    }
    with RankedEngine(tmp_path, speculative=speculative) as engine:
        found = [each.tokens for each in engine.run(prompts, 20, **given)]
    one = TokenEngine(tmp_path, speculative=speculative)
    assert found == [each.tokens for each in one.run(prompts, 20, **given)]
    plain = [each.tokens for each in one.run(prompts, 20, temperature=0.9, seed=5)]
    assert all(mine != theirs for mine, theirs in zip(found, plain, strict=True))
    one.worker.close()


def test_a_draft_of_which_ranks_can_not_have_parts_is_refused_by_name(tmp_path: Path) -> None:
    target = llama(**TARGET)
    save(target, tmp_path)
    eagle(target, tmp_path / "draft", num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    with pytest.raises(ConfigError, match="tp is 2, and this model has 3 attention heads"):
        on_ranks(tmp_path, 2, speculative="eagle")


def test_a_trial_of_proposals_is_left_out_and_said(tmp_path: Path) -> None:
    settings: dict[str, Any] = of_eagle(tmp_path) | {"speculative": "auto"}
    with RankedEngine(tmp_path, **settings) as engine:
        row = next(row for row in engine.started.ledger.rows if row.topic == "speculative")
        assert row.effective == "off" and "do not measure whether" in row.reason
        assert engine.worker.limits.draft_tokens == 0
