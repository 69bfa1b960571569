"""Layered prefill: prompts run in slices of layers between decode steps, and no number depends on
the division of layers or on the steps between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.checkpoint.model_config import read_config
from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.engine.start import start
from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.forward_batch import StalePlanError
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.overlap.slices import OpenPrompt, Slices
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.layered_prefill.slice_pace import Pace
from sglcore.step.slice_decisions import slice_budget
from tests.checkpoints import (
    falcon_h1,
    gemma3,
    granite_hybrid,
    llama,
    mistral,
    qwen3_moe,
    qwen3_next,
    save,
)
from tests.laws.engine import TokenEngine, check_logprobs, environ, on_this_device, random_prompts, running_slices

CONTEXT = 96
MODELS: MappingProxyType[str, Callable[[], Any]] = MappingProxyType(
    {
        "llama": lambda: llama(max_position_embeddings=CONTEXT, num_hidden_layers=4),
        "mistral-window": lambda: mistral(max_position_embeddings=CONTEXT, sliding_window=6),
        "gemma3": lambda: gemma3(max_position_embeddings=CONTEXT),
        "qwen3-moe": lambda: qwen3_moe(max_position_embeddings=CONTEXT),
        "qwen3-next": lambda: qwen3_next(max_position_embeddings=CONTEXT),
        "granite-hybrid": lambda: granite_hybrid(max_position_embeddings=CONTEXT),
    }
)


class Case:
    """A saved checkpoint and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = MODELS[name]()
        self.folder = save(self.oracle, folder)

    def engine(self, **settings: Any) -> TokenEngine:
        """Make an engine with slices of one or two layers, unless `settings` say otherwise."""
        defaults = {"max_model_len": CONTEXT, "max_batch_tokens": 24, "poison": True, "graph": "off"}
        return TokenEngine(self.folder, **{"prompt_slices": "40", **defaults, **settings})

    def check(self, engine: TokenEngine, seed: int = 1) -> None:
        """Run prompts that arrive while earlier ones decode, some with a common prefix, and check
        all numbers."""
        base = random_prompts(seed, (33,))[0]
        prompts = [*random_prompts(seed + 1, (5, 40)), base, base[:28] + [4, 5], *random_prompts(seed + 2, (1, 17))]
        check_logprobs(engine.run(prompts, 12, stagger=2, score_prompts=True), self.oracle)
        check_logprobs(engine.run([base[:21] + tail for tail in random_prompts(9, (3, 7))], 6, stagger=1), self.oracle)


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("plain"))


def slices_of(engine: TokenEngine) -> set[str]:
    """Return the ranges of layers that an engine's steps ran."""
    return {path for path in engine.paths if path.startswith("layers")}


@pytest.mark.needs("device")
@pytest.mark.parametrize("budget", ["1", "40", "auto"])
def test_a_prompt_by_slices_gives_what_it_gives_whole(case: Case, budget: str) -> None:
    engine = case.engine(prompt_slices=budget)
    case.check(engine)
    assert slices_of(engine), engine.paths


def test_decode_steps_between_slices_replay_their_graphs(plain: Case, graph: str) -> None:
    engine = plain.engine(graph=graph)
    plain.check(engine)
    assert slices_of(engine) and (graph == "off" or any(path.startswith(graph) for path in engine.paths)), engine.paths


@pytest.mark.needs("device")
def test_who_gives_way_while_its_layers_run_computes_them_again(plain: Case) -> None:
    pages = CONTEXT // 4 + 2
    probe = plain.engine()
    size = probe.worker.limits.kv_bytes // (probe.worker.limits.num_pages + 1)
    engine = plain.engine(kv_cache_memory=pages * size, prefix_cache=False)
    for seed in range(3):
        check_logprobs(engine.run(random_prompts(seed, (20, 21, 30, 22)), 30, stagger=3), plain.oracle)
    assert engine.scheduler.stats().retractions and slices_of(engine)


@pytest.mark.needs("device")
def test_grammars_and_draws_are_those_of_whole_prompts(plain: Case) -> None:
    prompts = random_prompts(4, (9, 40, 33, 12))
    wanted, found = (
        plain.engine(prompt_slices=asked).run(
            prompts, 10, stagger=2, grammars=(None, 5, 6, None), temperature=0.8, seed=3, repetition_penalty=1.2
        )
        for asked in ("off", "24")
    )
    assert [each.tokens for each in found] == [each.tokens for each in wanted]


@pytest.mark.needs("device")
@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid"])
def test_states_that_a_prompt_by_slices_leaves_are_hit_by_others(name: str, tmp_path: Path) -> None:
    """Another request decodes meanwhile, so that no prompt runs all its layers in one step."""
    case = Case(name, tmp_path)
    engine = case.engine(prompt_slices="1", max_batch_tokens=40)
    base = random_prompts(8, (33,))[0]
    first = [base[:21] + tail for tail in random_prompts(9, (3, 1, 6))]
    for others in ([base], first, first):
        found = engine.run([random_prompts(7, (5,))[0], *others], 40, stagger=3)
        check_logprobs(found, case.oracle)
    whole = {path for path in engine.paths if path.endswith(f"layers 0 to {engine.worker.limits.sliced_layers}")}
    assert engine.scheduler.stats().snapshot_hits >= 4 and not whole, engine.paths


def test_slices_plan_by_a_backend_of_their_own_over_the_same_pools(plain: Case) -> None:
    runner = plain.engine().worker.runner
    slices = running_slices(plain.engine())
    own, others = slices._attention, slices._runner.attn_backend
    assert own is not others and own.token_to_kv_pool is others.token_to_kv_pool
    assert own.req_to_token_pool is others.req_to_token_pool and runner.attn_backend is not own


def test_a_slice_that_is_not_the_next_is_refused(plain: Case) -> None:
    slices = running_slices(plain.engine())
    with pytest.raises(ValueError, match="requests layers 1 to 2 of a prompt; no prompt is open"):
        slices.run(1, 2)


def test_a_worker_that_takes_prompts_whole_refuses_slices(plain: Case) -> None:
    engine, other = plain.engine(prompt_slices="off"), plain.engine()
    other.scheduler.add(other.request([5, 6, 7], PARAMS))
    other.loop.step()
    other.scheduler.add(other.request([5, 6, 7] * 9, PARAMS))
    while (batch := other.scheduler.next_batch()) is not None and batch.layers is None:
        pass
    assert batch is not None
    with pytest.raises(RuntimeError, match="takes prompts whole"):
        engine.worker.submit(batch.copy_for_forward())


class ForgetsItsState(Slices):
    """Mutant: each slice starts from the embedded tokens."""

    def run(self, first: int, last: int) -> tuple[OpenPrompt, tuple[Tensor, Tensor] | None]:
        if self._open is not None and first:
            with self._running(), forward_context(self._runner.context(self._open.view, self._attention)):
                self._open.state = self._model.embed(self._open.view)
        return super().run(first, last)


class SkipsALayer(Slices):
    def run(self, first: int, last: int) -> tuple[OpenPrompt, tuple[Tensor, Tensor] | None]:
        if self._open is None or first != 1 or last == self._model.sliced_layers:
            return super().run(first, last)
        self._open.done = last
        return self._open, None


class ForgetsTheNorm(Slices):
    """Mutant: halves the last layer's output, as if the final norm lost a part of its input."""

    def run(self, first: int, last: int) -> tuple[OpenPrompt, tuple[Tensor, Tensor] | None]:
        if self._open is not None and last == self._model.sliced_layers:
            with self._running():
                self._open.state = self._open.state._replace(hidden=self._open.state.hidden * 0.5)
        return super().run(first, last)


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", [ForgetsItsState, SkipsALayer, ForgetsTheNorm])
def test_a_planted_defect_is_caught(plain: Case, kind: type) -> None:
    engine = plain.engine()
    slices = running_slices(engine)
    slices.__class__ = kind
    with pytest.raises(AssertionError):
        plain.check(engine)


@pytest.mark.needs("device")
def test_a_pool_that_moved_between_two_slices_is_an_error(plain: Case) -> None:
    engine = plain.engine(prompt_slices="1")
    slices = running_slices(engine)
    engine.scheduler.add(engine.request([5, 6, 7], PARAMS))
    engine.loop.step()
    engine.scheduler.add(engine.request([5, 6, 7] * 9, PARAMS))
    while slices._open is None:
        engine.loop.step()
    slices._attention.token_to_kv_pool.generation += 1
    with pytest.raises(StalePlanError, match="generation"):
        while slices._open is not None:
            engine.loop.step()


PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def ledger_row(folder: Path, topic: str = "prompt slices", **settings: Any) -> Row:
    """Return the ledger row of a topic."""
    config = resolve_config(
        {**on_this_device(), "model": str(folder), "dtype": "float32", "graph": "off", **settings}, environ()
    )
    return next(row for row in start(config).ledger.rows if row.topic == topic)


def test_the_ledger_says_how_prompts_come(plain: Case, tmp_path: Path) -> None:
    row = ledger_row(plain.folder, prompt_slices="auto")
    assert row.effective == "by the clock" and f"at most {Pace.SHARE} of a decode step" in row.reason
    assert f"at least {Pace.LEAST_TOKENS} tokens" in row.reason
    assert ledger_row(plain.folder, prompt_slices="4096").effective == "4096 tokens x layers"
    row = ledger_row(plain.folder, prompt_slices="auto", speculative="ngram")
    assert (row.effective, row.remedy, row.downgrade) == ("off", "--speculative off", False)
    assert ledger_row(plain.folder, prompt_slices="64", speculative="ngram").downgrade
    row = ledger_row(plain.folder, topic="speculative", prompt_slices="auto", speculative="auto")
    assert (row.effective, row.remedy) == ("off", "--prompt-slices off"), (
        "what may be tried gives way to what is asked for"
    )
    other = save(falcon_h1(max_position_embeddings=CONTEXT), tmp_path)
    assert "not divided into layers" in ledger_row(other, prompt_slices="auto").reason


class OwnForward(LlamaForCausalLM):
    """A model with a forward that differs from `run_layers`."""

    def __call__(self, batch: Any) -> Any:
        return self.finish(self.run_layers(self.embed(batch), 0, len(self.layers)))


def test_a_class_with_a_forward_of_its_own_is_not_divided(plain: Case) -> None:
    def layers(made: type) -> int:
        found = load_model(
            plain.folder,
            read_config(plain.folder),
            kernels=KernelTable(),
            device="cpu",
            dtype=torch.float32,
            architectures={"LlamaForCausalLM": f"{made.__module__}:{made.__name__}"},
        )
        assert isinstance(found, made)
        return found.sliced_layers

    assert (layers(LlamaForCausalLM), layers(OwnForward)) == (4, 0)


@pytest.mark.parametrize("asked", ["on", "0", "-3", "2.5", ""])
def test_a_setting_that_can_not_be_read_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="wanted auto, off, or a number of tokens times layers"):
        slice_budget(asked)
