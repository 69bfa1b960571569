"""Compares this device with the CPU device and with transformers: same tokens and log-probabilities
under every schedule.

In float32 on tiny random checkpoints of several architectures, and on the embedded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests import record
from devices.mlx.tests.parity import CONTEXT, TokenEngine, check_same
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.session import Result
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import TokenLogprob

pytestmark = pytest.mark.needs("torch")

NAMES = ("llama", "llama3-rope", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "qwen3-next")
LENGTHS = (1, 5, 30, 17, 9)
TO_DEVICE = 1e-3
TO_TRANSFORMERS = 2e-4
TO_16_BITS = 0.15
"""Tolerance in nats of the embedded model's log-probabilities in bfloat16, for different orders of
summation."""


def make_model(name: str) -> Any:
    """Return a random transformers model in float32."""
    from tests import checkpoints as tiny

    context = {"max_position_embeddings": CONTEXT}
    kinds = {
        "llama": lambda: tiny.llama(**context),
        "llama3-rope": lambda: tiny.llama(**context, **tiny.rope("llama3", **tiny.LLAMA3)),
        "mistral-window": lambda: tiny.mistral(**context, sliding_window=6),
        "qwen2": lambda: tiny.qwen2(**context),
        "qwen3": lambda: tiny.qwen3(**context, tie_word_embeddings=True),
        "qwen3-moe": lambda: tiny.qwen3_moe(**context),
        "qwen3-next": lambda: tiny.qwen3_next(**context),
    }
    return kinds[name]()


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, its transformers model, and both devices started on it."""

    folder: Path
    model: Any
    host: TokenEngine
    mlx: TokenEngine

    def both(self, runs: Sequence[tuple[dict[str, Any], Sequence[list[int]], int, dict[str, Any]]]) -> None:
        """Assert that both devices give the same results for runs of (how, prompts, tokens,
        sampling), each with a new scheduler."""
        for how, prompts, tokens, sampling in runs:
            found = self.mlx.session(**how).run(prompts, tokens, **sampling)
            wanted = self.host.session(**how).run(prompts, tokens, **sampling)
            check_same(found, wanted, TO_DEVICE)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    from tests import checkpoints as tiny

    model = make_model(request.param)
    folder = tiny.save(model, tmp_path_factory.mktemp(request.param))
    with TokenEngine(folder, "cpu", kv_cache_memory=8 << 20) as host, TokenEngine(folder) as mlx:
        yield Case(folder, model, host, mlx)


def check_transformers(results: Sequence[Result], model: Any) -> None:
    """Assert that all log-probabilities, including requested prompt log-probabilities, equal those
    of transformers for the same tokens."""
    import torch

    for result in results:
        ids = result.prompt + result.tokens
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first = 1 if result.prompt_logprobs else len(result.prompt)
        wanted = [float(scores[place - 1, ids[place]]) for place in range(first, len(ids))]
        found = result.prompt_logprobs + result.logprobs
        np.testing.assert_allclose(found, wanted, atol=TO_TRANSFORMERS, rtol=0)


def test_whole_prompts_and_64_greedy_steps_are_those_of_transformers(case: Case) -> None:
    import torch

    prompts = random_prompts(1, (7, 23))
    results = case.mlx.session().run(prompts, 64, score_prompts=True)
    check_transformers(results, case.model)
    for result in results:
        with torch.no_grad():
            out = case.model.generate(
                torch.tensor([result.prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert result.tokens == out[0, len(result.prompt) :].tolist()


def test_whole_prompts_and_decodes_are_those_of_the_processor(case: Case) -> None:
    scored = {"score_prompts": True}
    drawn = {"temperature": 0.9, "seed": 7, "top_k": 30, "top_p": 0.95}
    case.both([({}, random_prompts(2, LENGTHS), 16, scored), ({}, random_prompts(3, LENGTHS), 16, drawn)])


@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_ragged_arrivals_and_mixed_batches_change_nothing(case: Case, overlap: bool) -> None:
    rng = np.random.default_rng(5 + overlap)
    for seed in (4, 5):
        chunk, stagger = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        print(f"seed {seed}: chunks of {chunk}, an arrival every {stagger} steps")
        how = {"overlap": overlap, "chunk": chunk, "stagger": stagger}
        drawn = {"temperature": 0.8, "seed": seed, "score_prompts": True}
        prompts = random_prompts(seed, LENGTHS)
        case.both([(how, prompts, 12, drawn)])
        check_transformers(case.mlx.session(**how).run(prompts, 12, score_prompts=True), case.model)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16])
def test_any_page_size_in_any_order_changes_nothing(case: Case, page_size: int) -> None:
    prompts = random_prompts(page_size, LENGTHS)
    wanted = case.host.session().run(prompts, 10)
    with TokenEngine(case.folder, page_size=page_size, poison=True) as engine:
        check_same(engine.session(scramble=page_size).run(prompts, 10), wanted, TO_DEVICE)
        mixed = engine.session(scramble=page_size, chunk=7, stagger=2).run(prompts, 10)
        check_same(mixed, wanted, TO_DEVICE)


@pytest.mark.parametrize("backend", ["gathered", "processor"])
def test_any_attention_backend_and_two_threads_change_nothing(case: Case, backend: str) -> None:
    if backend == "processor" and mx.default_device().type != mx.cpu:
        pytest.skip("this build of MLX does not compute on the processor")
    prompts = random_prompts(11, LENGTHS)
    how = {"chunk": 6, "stagger": 1}
    wanted = case.host.session(**how).run(prompts, 14, score_prompts=True)
    with TokenEngine(case.folder, attention_backend=backend, threads=2, poison=True) as engine:
        check_same(engine.session(**how).run(prompts, 14, score_prompts=True), wanted, TO_DEVICE)
        check_same(engine.session().run(prompts, 14, score_prompts=True), wanted, TO_DEVICE)


def test_prefix_hits_change_nothing(case: Case) -> None:
    base = random_prompts(8, (33,))[0]
    others = [base, *(base[:21] + tail for tail in random_prompts(9, (3, 1, 6)))]
    session = case.mlx.session()
    session.run([base], 4)
    if case.mlx.worker.limits.keeps_state:
        session.run(others[1:], 4)  # snapshots are taken where earlier prompts diverged
    found = session.run(others, 8)
    assert [result.cached for result in found] == [32, 20, 20, 20]
    check_same(found, case.host.session(prefix_cache=False).run(others, 8), TO_DEVICE)


@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_and_recompute_change_nothing(case: Case, overlap: bool) -> None:
    prompts = random_prompts(10, (20, 24, 28, 22))
    session = case.mlx.session(pages=CONTEXT // 4 + 2, stagger=1, overlap=overlap)
    found = session.run(prompts, 40)
    assert session.scheduler.stats().retractions > 0
    check_same(found, case.host.session().run(prompts, 40), TO_DEVICE)


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[LLM, LLM]]:
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "graph": "off", "max_requests": 8}
    with LLM(device="mlx", **settings) as mlx, LLM(device="cpu", **settings) as host:
        yield mlx, host


def test_the_record_is_what_the_processor_still_says(embedded: tuple[LLM, LLM]) -> None:
    _, host = embedded
    written = record.read()
    for kind, questions in {"greedy": record.greedy(), "sampled": record.sampled()}.items():
        assert not record.differences(record.answer(host, questions), written[kind], 1e-4), f"python {record.__file__}"


def test_the_embedded_model_writes_and_draws_the_processors_texts(embedded: tuple[LLM, LLM]) -> None:
    mlx, host = embedded
    for questions in (record.greedy(), record.sampled()):
        assert not record.differences(record.answer(mlx, questions), record.answer(host, questions), TO_DEVICE)


def test_a_compiled_decode_step_gives_what_the_step_gives(embedded: tuple[LLM, LLM]) -> None:
    _, host = embedded
    questions = [
        record.Question(question.prompt, {**question.params, "max_tokens": 24}) for question in record.greedy()
    ]
    with LLM(device="mlx", dtype="float32", graph="compiled", graph_buckets=(4,), max_requests=4) as compiled:
        assert not record.differences(record.answer(compiled, questions), record.answer(host, questions), TO_DEVICE)


def test_in_16_bits_texts_part_only_where_two_tokens_are_nearly_equal() -> None:
    """Prints where they diverge and the margin between the two tokens; up to there the
    log-probabilities agree."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=4)
    texts: list[list[list[TokenLogprob]]] = []
    for device in ("mlx", "cpu"):
        with LLM(device=device, dtype="bfloat16", threads=1, graph="off", max_requests=4) as llm:
            outputs = llm.generate(list(record.PROMPTS), params)
            texts.append([list(output.outputs[0].logprobs or ()) for output in outputs])
    for prompt, mine, theirs in zip(record.PROMPTS, *texts, strict=True):
        print(f"{prompt!r}: {compare_16_bits(mine, theirs)}")


def compare_16_bits(mine: Sequence[TokenLogprob], theirs: Sequence[TokenLogprob]) -> str:
    """Describe where two texts diverge; asserts that rounding explains it."""
    worst = 0.0
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.token_id != other.token_id:
            margin = other.logprob - dict(other.top).get(one.token_id, -np.inf)
            assert margin <= 2 * TO_16_BITS, f"token {place}: {one}, {other}"
            return f"they part at token {place}, {margin:.4f} apart; before it the largest difference is {worst:.4f}"
        worst = max(worst, abs(one.logprob - other.logprob))
        assert worst <= TO_16_BITS, f"token {place}: {one}, {other}"
    return f"equal over {len(mine)} tokens; the largest difference is {worst:.4f}"
