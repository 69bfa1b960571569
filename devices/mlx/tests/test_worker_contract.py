"""Tests of the worker contract without a scheduler: submit does not wait, tickets are collected
once, collect raises a step's error, and close ends everything. Does not use torch.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from devices.mlx.tests.parity import DEFAULTS, TokenEngine, write_tiny
from sglcore.config.engine_config import resolve_config
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.mutant import Mutant
from sglcore.conformance.target import StartedDevice, Target
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, ModelWorker
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from sglcore_mlx import package
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import Model
from sglcore_mlx.worker import MlxWorker

PROMPT = random_prompts(1, (6,))[0]
PAGE_SIZE = DEFAULTS["page_size"]
SECONDS = 30
"""Timeout of waits for other threads."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a step: its slot, the number of tokens computed before, this step's tokens,
    and its new pages."""

    slot: int
    prefix: int
    ids: Sequence[int]
    new_pages: Sequence[int] = ()
    emits: bool = True


def make_step(number: int, mode: ForwardMode, rows: Sequence[Row], *, composition: int = 0) -> ScheduleBatch:
    """Return a greedy step of these rows, as a scheduler would send it."""
    counts = np.array([len(row.ids) for row in rows], np.int32)
    prefix = np.array([row.prefix for row in rows], np.int32)
    greedy = [(SamplingParams(temperature=0.0, logprobs=2), 0)] * len(rows)
    return ScheduleBatch(
        step=number,
        forward_mode=mode,
        slots=np.array([row.slot for row in rows], np.int32),
        seq_lens=prefix + counts,
        prefix_lens=prefix,
        token_offsets=_offsets(counts),
        input_ids=np.concatenate([np.array(row.ids, np.int32) for row in rows]),
        page_counts=-(-prefix // PAGE_SIZE),
        new_page_offsets=_offsets([len(row.new_pages) for row in rows]),
        new_pages=np.array([page for row in rows for page in row.new_pages], np.int32),
        emits=np.array([row.emits for row in rows], np.bool_),
        composition=composition or number,
        sampling=None if mode is ForwardMode.EMBED else SamplingBatch.from_params(greedy),
    )


def _offsets(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])


def prefill(number: int, slot: int = 1, first_page: int = 1, ids: Sequence[int] = PROMPT) -> ScheduleBatch:
    """Return a step with a whole prompt in its own pages."""
    pages = range(first_page, first_page + -(-len(ids) // PAGE_SIZE))
    return make_step(number, ForwardMode.EXTEND, [Row(slot, 0, ids, tuple(pages))])


def decode(number: int, length: int, slot: int = 1, new_pages: Sequence[int] = ()) -> ScheduleBatch:
    """Return a decode step of a slot with `length` tokens in the KV cache; only the device knows
    the input token."""
    return make_step(number, ForwardMode.DECODE, [Row(slot, length, [-slot], new_pages)])


def run(worker: ModelWorker, batch: ScheduleBatch) -> BatchResult:
    """Run one step; waits."""
    return worker.collect(worker.submit(batch))


def two_tokens(worker: ModelWorker) -> list[int]:
    """Run a prompt, then a decode step; return the two tokens."""
    return [int(run(worker, step).token_ids[0]) for step in (prefill(1), decode(2, len(PROMPT)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def worker(folder: Path) -> Iterator[MlxWorker]:
    with TokenEngine(folder) as engine:
        assert isinstance(engine.worker, MlxWorker)
        yield engine.worker


def test_submit_returns_while_the_device_is_busy(worker: MlxWorker) -> None:
    wanted = two_tokens(worker)
    gate = threading.Event()
    worker._thread.post(gate.wait, SECONDS)
    tickets = [worker.submit(step) for step in (prefill(3), decode(4, len(PROMPT)))]
    pending: list[Any] = [ticket.payload for ticket in tickets]
    assert not any(item.done() for item in pending)
    gate.set()
    assert [int(worker.collect(ticket).token_ids[0]) for ticket in tickets] == wanted


def test_a_result_says_its_step_and_has_one_entry_a_row(worker: MlxWorker) -> None:
    rows = [Row(1, 0, PROMPT[:3], (1,)), Row(2, 0, PROMPT, (2, 3), emits=False), Row(3, 0, PROMPT[:1], (4,))]
    result = run(worker, make_step(7, ForwardMode.EXTEND, rows))
    assert (result.step, result.token_offsets.tolist(), result.bad_rows.tolist()) == (7, [0, 1, 1, 2], [False] * 3)
    assert (result.token_ids.dtype, result.token_offsets.dtype, result.bad_rows.dtype) == (np.int32, np.int32, np.bool_)
    assert result.logprobs is not None and result.logprobs.top_ids.shape == (2, 2)
    assert result.logprobs.top_ids[:, 0].tolist() == result.token_ids.tolist()
    assert (result.logprobs.ranks == 1).all() and (result.logprobs.chosen < 0).all()


def test_the_last_tokens_are_those_of_the_rows_that_emitted_wherever_they_stand(worker: MlxWorker) -> None:
    wanted = two_tokens(worker)
    rows = [Row(2, 0, PROMPT[:2], (3,), emits=False), Row(1, 0, PROMPT, (1, 2)), Row(3, 0, PROMPT[:1], (5,))]
    first = run(worker, make_step(3, ForwardMode.EXTEND, rows))
    rows = [Row(3, 1, [-3]), Row(1, len(PROMPT), [-1]), Row(2, 2, PROMPT[2:], (4,))]
    second = run(worker, make_step(4, ForwardMode.MIXED, rows))
    assert [int(first.token_ids[0]), *second.token_ids[1:].tolist()] == [*wanted, wanted[0]]


def test_a_step_in_which_no_row_emits_gives_no_token(worker: MlxWorker) -> None:
    result = run(worker, make_step(1, ForwardMode.EXTEND, [Row(1, 0, PROMPT[:4], (1,), emits=False)]))
    assert (result.token_ids.tolist(), result.token_offsets.tolist()) == ([], [0, 0])
    rest = run(worker, make_step(2, ForwardMode.EXTEND, [Row(1, 4, PROMPT[4:], (2,))]))
    assert rest.token_ids.tolist() == two_tokens(worker)[:1]


def test_a_ticket_is_collected_once(worker: MlxWorker) -> None:
    ticket = worker.submit(prefill(1))
    worker.collect(ticket)
    with pytest.raises(ValueError, match="step 1 was collected before"):
        worker.collect(ticket)


def test_a_ticket_that_nobody_collects_harms_no_other_step(worker: MlxWorker) -> None:
    wanted = two_tokens(worker)
    worker.submit(prefill(3, slot=2, first_page=9))
    assert two_tokens(worker) == wanted


def test_hidden_states_are_refused_before_anything_runs(worker: MlxWorker) -> None:
    batch = prefill(1)
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    with pytest.raises(ValueError, match="step 1 requests hidden states"):
        worker.submit(batch)
    assert two_tokens(worker)


def test_what_building_a_step_raises_comes_out_of_its_collect_and_others_go_on(worker: MlxWorker) -> None:
    wanted = two_tokens(worker)
    nowhere = worker.limits.max_requests + 5
    tickets = [worker.submit(step) for step in (prefill(3, slot=nowhere), prefill(4))]
    with pytest.raises(IndexError):
        worker.collect(tickets[0])
    assert worker.collect(tickets[1]).token_ids.tolist() == wanted[:1]
    assert two_tokens(worker) == wanted


class Exploding:
    """A model that inverts a singular matrix for batches of three tokens, which fails only when it
    runs. With many `further` operations MLX has the error before it waits for the step, and the
    step's arrays can be read then."""

    further = 0
    against_norm_inputs = "it explodes"

    def __init__(self, model: Model) -> None:
        self.config, self.dtype, self.layers, self.states = model.config, model.dtype, model.layers, model.states
        self.num_bytes, self.quantization = model.num_bytes, model.quantization
        self._model = model

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Return the hidden states; fails for three tokens."""
        hidden = self._model(batch)
        if batch.num_tokens == 3:
            hidden = hidden + mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu).sum()
            for _ in range(self.further):
                hidden = hidden + 1e-3
        return hidden

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[mx.array, mx.array]:
        """Return the hidden states, twice."""
        hidden = self(batch)
        return hidden, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the model's logits."""
        return self._model.logits(hidden)


class ExplodingEarly(Exploding):
    """The error is known before anything waits."""

    further = 200


def start_with(folder: Path, mutant: Mutant) -> StartedDevice:
    """Start the device with one step of its bring-up changed."""
    config = resolve_config({**DEFAULTS, "device": "mlx", "model": str(folder)}, {})
    return Target(package).broken_by(mutant).start(config, folder)


@pytest.mark.parametrize("model", [Exploding, ExplodingEarly])
def test_a_step_that_fails_on_the_device_says_so_and_the_worker_does_afterwards(
    folder: Path, model: type[Exploding]
) -> None:
    mx.eval(mx.ones(4) + 1)
    worker = start_with(folder, Mutant(name="explodes", says="", steps=MappingProxyType({"model": model}))).worker
    assert two_tokens(worker)
    tickets = [worker.submit(step) for step in (prefill(3, ids=PROMPT[:3]), prefill(4))]
    with pytest.raises(RuntimeError, match="Inverse"):
        worker.collect(tickets[0])
    for ticket in (tickets[1], worker.submit(prefill(5))):
        with pytest.raises(RuntimeError, match="earlier step failed.*start another worker"):
            worker.collect(ticket)
    worker.close()


@pytest.mark.parametrize("model", [Exploding, ExplodingEarly])
def test_a_step_that_fails_and_that_no_other_follows_says_so(folder: Path, model: type[Exploding]) -> None:
    mx.eval(mx.ones(4) + 1)
    worker = start_with(folder, Mutant(name="explodes", says="", steps=MappingProxyType({"model": model}))).worker
    with pytest.raises(RuntimeError, match="Inverse"):
        worker.collect(worker.submit(prefill(1, ids=PROMPT[:3])))
    worker.close()


def test_after_a_step_that_could_not_be_started_nothing_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory")

    worker = TokenEngine(folder).worker
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", refuse)
        with pytest.raises(RuntimeError, match="no memory"):
            worker.collect(worker.submit(prefill(1)))
    with pytest.raises(RuntimeError, match="earlier step failed.*start another worker"):
        worker.collect(worker.submit(prefill(2)))
    worker.close()


def test_closing_twice_is_closing_once_and_nothing_runs_afterwards(folder: Path) -> None:
    worker = TokenEngine(folder).worker
    two_tokens(worker)
    for _ in range(2):
        worker.close()
    with pytest.raises(RuntimeError, match="this worker is closed; start another"):
        worker.submit(prefill(3))
    assert worker.limits.vocab_size > 0


def test_closing_with_a_step_in_flight_ends_the_thread_and_frees_the_model(folder: Path) -> None:
    before = threading.active_count()
    running = start_with(folder, Mutant(name="none", says=""))
    model = weakref.ref(running.built["model"])
    worker = running.worker
    tickets = [worker.submit(prefill(1)), worker.submit(decode(2, len(PROMPT)))]
    worker.close()
    assert threading.active_count() == before
    last: Any = tickets[1].payload
    assert last.result()[1].done(), "nobody would ever settle it"
    assert [len(worker.collect(ticket).token_ids) for ticket in tickets] == [1, 1]
    del running, worker, tickets, last
    gc.collect()
    assert model() is None


def test_two_workers_in_one_process_do_not_meet(folder: Path, tmp_path: Path) -> None:
    with TokenEngine(folder) as one, TokenEngine(write_tiny(tmp_path, seed=5), page_size=PAGE_SIZE) as other:
        wanted = two_tokens(one.worker), two_tokens(other.worker)
        assert wanted[0] != wanted[1]
        for build in (lambda: prefill(3), lambda: decode(4, len(PROMPT))):
            tickets = [engine.worker.submit(build()) for engine in (one, other)]
            found = [engine.worker.collect(t) for engine, t in zip((one, other), tickets, strict=True)]
            place = found[0].step - 3
            assert [int(result.token_ids[0]) for result in found] == [tokens[place] for tokens in wanted]


def write_encoder(folder: Path) -> Path:
    """Write a random BERT of two layers, with numpy only; return the folder."""
    hidden, inner, vocab = 32, 48, 97
    dense = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden)}
    dense |= {"attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden)}
    dense |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (vocab, hidden)}
    shapes |= {
        "embeddings.position_embeddings.weight": (64, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    norms = ["embeddings"]
    for layer in range(2):
        prefix = f"encoder.layer.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in dense.items()}
        shapes |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in dense.items()}
        norms += [f"{prefix}.attention.output", f"{prefix}.output"]
    shapes |= {f"{norm}.LayerNorm.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}
    rng = np.random.default_rng(3)
    weights = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": vocab, "max_position_embeddings": 64}
    config |= {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_an_embedding_is_the_same_alone_and_among_others_and_has_length_1(tmp_path: Path) -> None:
    prompts = random_prompts(4, (5, 1, 12, 7))
    with TokenEngine(write_encoder(tmp_path)) as engine:
        worker = engine.worker
        assert not worker.limits.generates
        rows = [Row(0, 0, prompt, emits=False) for prompt in prompts]
        together = run(worker, make_step(1, ForwardMode.EMBED, rows))
        assert together.embeddings is not None and together.embeddings.dtype == np.float32
        assert (len(together.token_ids), together.bad_rows.tolist()) == (0, [False] * 4)
        np.testing.assert_allclose(np.linalg.norm(together.embeddings, axis=1), 1, atol=1e-6)
        for place, row in enumerate(rows):
            alone = run(worker, make_step(2 + place, ForwardMode.EMBED, [row])).embeddings
            assert alone is not None
            np.testing.assert_allclose(alone[0], together.embeddings[place], atol=1e-5)


def test_the_scheduler_embeds_through_it(tmp_path: Path) -> None:
    with TokenEngine(write_encoder(tmp_path), max_batch_tokens=16) as engine:
        session = engine.session()
        prompts = random_prompts(5, (9, 4, 16, 2))
        requests = [
            Request(f"e{place}", np.array(prompt, np.int32), SamplingParams(), task="embed")
            for place, prompt in enumerate(prompts)
        ]
        session.submit(requests)
        session.finish()
        assert all(request.embedding is not None and request.finish_reason == "stop" for request in requests)
