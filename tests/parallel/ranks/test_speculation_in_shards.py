"""Speculation with data parallel shards: all ranks run the same forwards of the target and the
drafter, whatever requests each has; tokens equal those of one rank without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.start import start
from sglcore.step.draft_length import LengthController
from sglcore.worker.schedule_batch import ForwardMode
from tests.checkpoints import llama, qwen3_moe, qwen3_next, save
from tests.drafts import eagle3, next_token, next_tokens
from tests.latent import deepseek_v3
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.parallel import defects, forwards, graph_defects
from tests.parallel.engine import RankedEngine, configured
from tests.parallel.forwards import Step, check_forwards, check_replayed, recording

Make = Callable[[Path], tuple[Any, dict[str, Any]]]
"""Writes a model, and a draft model if there is one; returns the model and the settings."""
CONTEXT = 128
TOKENS = 3
DECODE, EXTEND, IDLE = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.IDLE


def dense(**changes: Any) -> Any:
    return llama(max_position_embeddings=CONTEXT, num_hidden_layers=6, **changes)


def sparse(**changes: Any) -> Any:
    return qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT, **changes)


def by_text(kind: str) -> Make:
    def made(folder: Path) -> tuple[Any, dict[str, Any]]:
        model = sparse()
        save(model, folder)
        return model, {"speculative": kind}

    return made


def by_text_of_states(folder: Path) -> tuple[Any, dict[str, Any]]:
    model = qwen3_next(max_position_embeddings=CONTEXT, num_experts=4)
    save(model, folder)
    return model, {"speculative": "ngram"}


def by_eagle3(folder: Path) -> tuple[Any, dict[str, Any]]:
    model = dense()
    save(model, folder)
    eagle3(model, folder / "draft")
    return model, {"speculative": "eagle3"}


def by_mtp(folder: Path) -> tuple[Any, dict[str, Any]]:
    """One MTP layer with experts and latent attention."""
    model = deepseek_v3()
    next_token(model, folder, deepseek_v3, first_k_dense_replace=0)
    return model, {"speculative": "mtp"}


def by_mtp_of_states(folder: Path) -> tuple[Any, dict[str, Any]]:
    """One MTP layer without states, of a model with states."""
    model = qwen3_next(max_position_embeddings=CONTEXT, num_experts=4)
    one = {"layer_types": ["full_attention"], "max_position_embeddings": CONTEXT, "num_experts": 4}
    next_token(model, folder, qwen3_next, "qwen", **one)
    return model, {"speculative": "mtp"}


def by_several(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Three such MTP layers."""
    model = deepseek_v3()
    next_tokens(model, folder, deepseek_v3, TOKENS, first_k_dense_replace=0)
    return model, {"speculative": "mtp"}


def by_another(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model with experts, and another one as its draft model."""
    model = sparse()
    save(model, folder)
    return model, {"speculative": "standalone", "draft_model": str(save(sparse(seed=1), folder / "small"))}


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter and the parallel sizes. `forwards`: number of draft forwards in a step, by the
    step's number of draft tokens and by whether any shard has prompts."""

    make: Make
    ranks: MappingProxyType[str, Any]
    forwards: Callable[[Step, bool], int] = lambda step, has_prompts: 0


def case(make: Make, forwards: Callable[[Step, bool], int] | None = None, **ranks: Any) -> Case:
    return Case(make, MappingProxyType(ranks), *([] if forwards is None else [forwards]))


def first_and_further(step: Step, has_prompts: bool) -> int:
    return max(step.proposed, 1)


def roots_alone(step: Step, has_prompts: bool) -> int:
    return max(step.proposed, 1) + has_prompts


CASES: MappingProxyType[str, Case] = MappingProxyType(
    {
        "ngram, experts on 2": case(by_text("ngram"), tp=2, dp=2, ep=2),
        "ngram, of a model with states": case(by_text_of_states, tp=2, dp=2),
        "suffix": case(by_text("suffix"), tp=2, dp=2),
        "eagle3, dense": case(by_eagle3, first_and_further, tp=2, dp=2, poison=False),
        "mtp": case(by_mtp, first_and_further, tp=2, dp=2),
        "mtp, of a model with states": case(by_mtp_of_states, first_and_further, tp=2, dp=2),
        "mtp, experts on 2": case(by_mtp, first_and_further, tp=2, dp=2, ep=2),
        "mtp, two ranks a shard, experts on 4": case(by_mtp, first_and_further, tp=4, dp=2, ep=4),
        "mtp, experts at fixed places": case(by_mtp, first_and_further, tp=2, dp=2, ep=2, expert_dispatch="fixed"),
        "mtp, in two halves": case(by_mtp, first_and_further, tp=2, dp=2, two_batch_overlap="on"),
        "mtp by several layers, experts on 2": case(by_several, None, tp=2, dp=2, ep=2),
        "a model of its own, experts on 2": case(by_another, roots_alone, tp=2, dp=2, ep=2),
    }
)


def run(engine: TokenEngine) -> list[Result]:
    """Prompts in chunks that arrive one after the other, greedy and sampled; a single request while
    all other shards are idle; and texts that repeat themselves."""
    prompts = random_prompts(5, (6, 21, 30, 3))
    found = engine.run(prompts, 9, stagger=2)
    found += engine.run(prompts[1:], 7, temperature=1.5, seed=11, stagger=1)
    found += engine.run(random_prompts(8, (21,)), 6)
    return found + engine.run(prompts[:3], 16, logit_bias={5: 30.0, 9: 30.0, 11: 30.0})


def alone(folder: Path, **settings: Any) -> tuple[list[Result], Counter[Any]]:
    """The same on one rank; with its draft counts."""
    engine = TokenEngine(folder, max_batch_tokens=16, graph="off", **settings)
    found = run(engine), engine.scheduler.drafts
    engine.worker.close()
    return found


def on_ranks(
    folder: Path, records: Path, defect: Any = defects.nothing, length: LengthController | None = None, **settings: Any
) -> tuple[list[Result], Counter[Any]]:
    """The same in shards; each rank writes its forwards to `records`. `length` replaces the length
    controller. Ranks that reach different collectives time out instead of waiting for ever."""
    given = {"max_batch_tokens": 16, "poison": settings["tp"] == 2, **settings}
    with RankedEngine(folder, recording(records, defect), **given) as engine:
        if length is not None:
            cast(Any, engine.loop)._length._length = length
        return run(engine), engine.scheduler.drafts


def check_same(found: list[Result], wanted: list[Result]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4, rtol=0)


def check_reached(steps: list[list[Step]]) -> None:
    """Check that the run had idle shards with busy ones, prefill with decode, later chunks of
    prompts, and shards with different numbers of requests."""
    going_on = [{step.mode for step in each} for each in zip(*steps, strict=True) if each[0].goes_on]
    assert {EXTEND, DECODE} in going_on and {EXTEND, IDLE} in going_on
    beside = [{step.mode for step in each} for each in zip(*steps, strict=True)]
    assert {DECODE, IDLE} in beside and {EXTEND, DECODE} in beside and {EXTEND, IDLE} in beside
    rows = [each[0].forwards[0].rows for each in zip(*steps, strict=True)]
    assert any(len(set(each)) > 1 and all(each) for each in rows)


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_without_proposals_and_all_ranks_run_the_same_forwards(name: str, tmp_path: Path) -> None:
    each = CASES[name]
    model, settings = each.make(tmp_path)
    plain, _ = alone(tmp_path)
    found, drafts = on_ranks(tmp_path, tmp_path, draft_tokens=TOKENS, **settings, **each.ranks)
    check_same(found, plain)
    check_logprobs(found[:4], model)
    assert drafts == alone(tmp_path, draft_tokens=TOKENS, **settings)[1]
    assert sum(accepted * count for (*_, accepted), count in drafts.items()) > 0
    steps = check_forwards(tmp_path, each.ranks["tp"])
    check_reached(steps)
    check_replayed(steps, each.ranks.get("ep", 1) == 1 or each.ranks.get("expert_dispatch") == "fixed")
    if each.make is by_several:
        return
    for beside in zip(*steps, strict=True):
        has_prompts = any(step.mode is EXTEND for step in beside)
        for step in beside:
            count = each.forwards(step, has_prompts)
            assert [one.runner for one in step.forwards] == [0] + [1] * count


def test_four_shards_do_the_same(tmp_path: Path) -> None:
    _, settings = by_mtp(tmp_path)
    prompts, given = random_prompts(5, (9, 4, 20, 3, 12)), {"max_batch_tokens": 8, "graph": "off"}
    one = TokenEngine(tmp_path, **given)
    plain = one.run(prompts, 5, stagger=1)
    one.worker.close()
    ranks: dict[str, Any] = {"tp": 4, "dp": 4, "ep": 4, "draft_tokens": TOKENS}
    with RankedEngine(tmp_path, recording(tmp_path, defects.nothing), **given, **settings, **ranks) as engine:
        check_same(engine.run(prompts, 5, stagger=1), plain)
    steps = check_forwards(tmp_path, 4)
    beside = [Counter(step.mode for step in each) for each in zip(*steps, strict=True)]
    assert any(each[DECODE] and each[EXTEND] and each[IDLE] for each in beside)


@pytest.mark.parametrize("make", [by_text("ngram"), by_several, by_another], ids=["ngram", "several layers", "another"])
def test_fixed_places_hold_all_that_requests_verify(make: Make, tmp_path: Path) -> None:
    """Full shards with more rows than a prefill step has."""
    _, settings = make(tmp_path)
    prompts, given = random_prompts(5, (3, 2, 4, 3, 2, 4)), {"max_batch_tokens": 8, "max_requests": 3, "graph": "off"}
    one = TokenEngine(tmp_path, **given)
    plain = one.run(prompts, 6)
    one.worker.close()
    ranks: dict[str, Any] = {"tp": 2, "dp": 2, "ep": 2, "expert_dispatch": "fixed", "draft_tokens": TOKENS}
    with RankedEngine(tmp_path, recording(tmp_path, defects.nothing), **given, **settings, **ranks) as engine:
        check_same(engine.run(prompts, 6), plain)
    most = max(forward.own for step in check_forwards(tmp_path, 2)[0] for forward in step.forwards)
    assert most > 8


class AtRandom(LengthController):
    """Chooses a random length before each step."""

    def __init__(self) -> None:
        super().__init__((0, 1, 3, 4))
        self.rng, self.taken = Random(7), Counter[int]()

    def choose(self, requests: int) -> None:
        self.tokens = self.rng.choice(self.lengths)
        self.taken[self.tokens] += 1


@pytest.mark.parametrize(
    "make",
    [by_mtp, by_another, by_text("ngram"), by_text_of_states],
    ids=["mtp", "a model of its own", "ngram", "ngram, of a model with states"],
)
def test_lengths_that_change_change_in_all_shards_at_once_and_no_text(make: Make, tmp_path: Path) -> None:
    _, settings = make(tmp_path)
    plain, _ = alone(tmp_path)
    length = AtRandom()
    found, _ = on_ranks(tmp_path, tmp_path, length=length, tp=2, dp=2, ep=2, **settings)
    check_same(found, plain)
    steps = check_forwards(tmp_path, 2)
    check_reached(steps)
    assert {step.verified for step in steps[0]} == {0, 1, 3, 4} == set(length.taken)


def test_a_start_without_a_number_changes_between_lengths_that_are_agreed_on(tmp_path: Path) -> None:
    _, settings = by_mtp(tmp_path)
    with RankedEngine(tmp_path, tp=2, dp=2, **settings) as engine:
        limits = engine.worker.limits
        assert (limits.draft_tokens, limits.draft_lengths) == (4, (0, 1, 3, 4))
        row = next(row for row in engine.started.ledger.rows if row.topic == "speculative")
        assert row.effective == "mtp, 0, 1, 3 or 4 tokens a step"
        engine.run(random_prompts(5, (21, 6, 30)), 40)
        assert {drafted for (_, _, drafted, _) in engine.scheduler.drafts} >= {1, 3, 4}
    with RankedEngine(tmp_path, tp=2, dp=2, draft_tokens=2, **settings) as engine:
        assert engine.worker.limits.draft_lengths == (2,)


DEFECTS: MappingProxyType[str, tuple[Any, Make, dict[str, Any]]] = MappingProxyType(
    {
        "idle, no draft": (forwards.idle_runs_no_draft, by_mtp, {"ep": 2}),
        "idle, no draft, no experts whole": (forwards.idle_runs_no_draft, by_mtp, {}),
        "idle, one draft": (forwards.idle_runs_one_draft, by_mtp, {"ep": 2}),
        "own width": (forwards.own_width, by_text("ngram"), {}),
        "own width, experts whole": (forwards.own_width, by_text("ngram"), {"ep": 2}),
        "own length": (forwards.own_length, by_mtp, {"ep": 2}),
        "requests counted": (forwards.counts_requests, by_mtp, {}),
        "roots not counted": (forwards.roots_are_not_counted, by_another, {}),
        "further rows as first": (forwards.further_rows_as_first, by_mtp, {}),
        "no front": (forwards.no_front, by_several, {"ep": 2}),
        "roots by own mode": (forwards.roots_by_own_mode, by_another, {"ep": 2}),
        "graph of own rows": (graph_defects.drafts_by_own_rows, by_mtp, {}),
    }
)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_shard_that_decides_for_itself_is_caught(name: str, tmp_path: Path) -> None:
    defect, make, ranks = DEFECTS[name]
    _, settings = make(tmp_path)
    plain, _ = alone(tmp_path)
    with pytest.raises((AssertionError, WorkerLost)) as caught:
        found, _ = on_ranks(tmp_path, tmp_path, defect, draft_tokens=TOKENS, tp=2, dp=2, **settings, **ranks)
        check_same(found, plain)
        check_forwards(tmp_path, 2)
    print(str(caught.value)[:400])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_accepted_by_probabilities_is_what_one_rank_accepts(rule: str, tmp_path: Path) -> None:
    _, settings = by_mtp(tmp_path)
    settings |= {"speculative_verify": rule}
    wanted, drafts = alone(tmp_path, **settings)
    found, own = on_ranks(tmp_path, tmp_path, tp=2, dp=2, ep=2, **settings)
    check_same(found, wanted)
    assert own == drafts
    check_forwards(tmp_path, 2)


def test_grammars_and_penalties_of_one_shard_do_not_show_in_another(tmp_path: Path) -> None:
    _, settings = by_mtp(tmp_path)
    prompts = random_prompts(7, (9, 14, 4))
    given: dict[str, Any] = {"grammars": (3, None, 8), "repetition_penalty": 1.3, "temperature": 0.9, "seed": 5}
    with RankedEngine(tmp_path, tp=2, dp=2, **settings) as engine:
        found = engine.run(prompts, 12, **given)
    one = TokenEngine(tmp_path, graph="off")
    check_same(found, one.run(prompts, 12, **given))
    one.worker.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"speculative": "dflash"}, "dp is 2 and speculative is 'dflash': data-parallel shards do not agree on a plan"),
        ({"speculative": "frozen-mtp"}, "data-parallel shards do not agree on a plan of its draft's forwards"),
        ({"speculative": "mtp", "draft_width": 2}, "data-parallel shards agree only on chains"),
    ],
)
def test_what_shards_do_not_agree_on_is_refused_before_any_process(
    asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = save(dense(), tmp_path)

    def never(spec: Any) -> Any:
        raise AssertionError("a process was started")

    with pytest.raises(ConfigError) as caught:
        start(configured(folder, dp=2, **asked), ranks=RankOptions(never))
    assert said in str(caught.value)
