"""Requests do not affect each other, and a failure leaves nothing in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch._dynamo.utils import counters

from sglcore import LLM, SamplingParams
from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import TextCodec, TextError
from sglcore.worker.model_worker import Ticket
from sglcore_cpu.graphs import CompiledGraphs

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
A, B = "Once upon a time", "2 + 3 ="


def texts(llm: LLM, prompts: list[str]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("given", [{"logit_bias": {2147 + 5: 1000.0}}, {"min_tokens": 3, "stop_token_ids": [2147 + 5]}])
def test_ids_beyond_the_vocabulary_are_refused_and_do_not_bias_the_next_row(llm: LLM, given: dict[str, Any]) -> None:
    alone = texts(llm, [B])[0]
    bad = SamplingParams(temperature=0.0, max_tokens=12, **given)
    refused, other = llm.generate([A, B], [bad, GREEDY])
    assert "2152" in refused.outputs[0].error
    assert other.outputs[0].text == alone


def test_streams_that_are_open_together_each_get_their_whole_text(llm: LLM) -> None:
    whole = texts(llm, [A, B])
    first, second = llm.stream(A, GREEDY), llm.stream(B, GREEDY)
    shown = [next(first).text, next(second).text]
    for one, two in zip(first, second, strict=True):
        shown[0] += one.text
        shown[1] += two.text
    assert shown == whole


def test_generating_or_closing_another_stream_takes_nothing_from_a_stream(llm: LLM) -> None:
    whole = texts(llm, [A, B])
    stream, closed = llm.stream(A, GREEDY), llm.stream(B, GREEDY)
    shown = next(stream).text + next(stream).text
    next(closed)
    closed.close()
    assert texts(llm, [B]) == whole[1:]
    assert shown + "".join(delta.text for delta in stream) == whole[0]
    assert not llm.engine.has_work


@pytest.mark.parametrize("prompt", [None, 5, [1.7, 2.2], [2**31], [2**70], ["x"], "\ud800"])
def test_a_prompt_that_can_not_be_read_is_refused_and_the_others_run(llm: LLM, prompt: Any) -> None:
    good, refused = llm.generate([A, prompt], GREEDY)
    assert good.outputs[0].finish_reason == "length"
    assert refused.outputs[0].finish_reason == "error"


class FailingWorker:
    """A worker that raises at the n-th submit."""

    def __init__(self, worker: Any, fails_at: int) -> None:
        self.limits, self.collect, self.close = worker.limits, worker.collect, worker.close
        self._worker, self._left = worker, fails_at

    def submit(self, batch: Any) -> Ticket:
        self._left -= 1
        if not self._left:
            raise OSError("planted")
        return self._worker.submit(batch)


def test_a_step_that_fails_leaves_no_request_of_its_call_behind(llm: LLM) -> None:
    whole = texts(llm, [A, B])
    worker = llm.engine.loop.worker
    llm.engine.loop.worker = FailingWorker(worker, fails_at=3)
    with pytest.raises(OSError, match="planted"):
        llm.generate([A] * 20, GREEDY)
    llm.engine.loop.worker = worker
    assert llm.engine.scheduler.stats().waiting == 0
    assert texts(llm, [A, B]) == whole
    llm.engine.scheduler.audit()


@pytest.mark.parametrize("fails_at", range(2, 9))
def test_a_stop_string_in_the_outputs_of_a_failed_step_ends_its_request_once(llm: LLM, fails_at: int) -> None:
    third = llm.engine.codec.token(llm.generate([A], GREEDY)[0].outputs[0].token_ids[2])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(third.strip(),), n=2)
    outputs = [llm.engine.add(A, params), llm.engine.add(B, GREEDY)]
    worker = llm.engine.loop.worker
    llm.engine.loop.worker = FailingWorker(worker, fails_at)
    try:
        with pytest.raises(OSError, match="planted"):
            while llm.engine.has_work:
                llm.engine.step()
    finally:
        llm.engine.loop.worker = worker
    while llm.engine.has_work:
        llm.engine.step()
    assert all(output.finished for output in outputs)
    llm.engine.scheduler.audit()


def test_prompt_scores_come_from_a_sample_that_has_them_all() -> None:
    with LLM(dtype="float32", threads=1, max_requests=1, max_batch_tokens=4, kv_cache_memory=32 << 20) as llm:
        worker = llm.engine.loop.worker
        llm.engine.loop.worker = FailingWorker(worker, fails_at=2)
        output = llm.engine.add(list(range(5, 16)), SamplingParams(max_tokens=2, n=2, prompt_logprobs=0))
        with pytest.raises(OSError, match="planted"):
            while llm.engine.has_work:
                llm.engine.step()
        while llm.engine.has_work:
            llm.engine.step()
        assert [each.finish_reason for each in output.outputs] == ["error", "length"]
        assert len(output.prompt_logprobs or []) == 11


def test_graph_buckets_that_hold_no_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="graph_buckets"):
        LLM(dtype="float32", threads=1, max_requests=2, graph="compiled", graph_buckets=(0, 64))


def word_pieces(folder: Path) -> TextCodec:
    """A tokenizer that marks spaces, strips the first one, and falls back to bytes, as
    SentencePiece models do."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁time", "▁upon", "Once", "e"]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(steps))  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def grown(codec: TextCodec, words: list[str], prompt: list[str]) -> str:
    ids = [[codec.tokenizer.token_to_id(word) or 0 for word in part] for part in (words, prompt)]
    text = IncrementalDetokenizer(codec, (), skip_special=True, include_stop=False, prompt=ids[1])
    shown = "".join(text.push([token_id]) for token_id in ids[0]) + text.finish()
    assert shown == text.text
    return shown


def test_the_first_word_keeps_the_space_between_it_and_the_prompt(tmp_path: Path) -> None:
    codec = word_pieces(tmp_path)
    assert grown(codec, ["▁time", "▁upon"], ["Once", "▁upon"]) == " time upon"
    assert grown(codec, ["▁time", "▁upon"], []) == "time upon"


def test_bytes_that_are_no_text_are_shown_as_unknown_and_raise_nothing(tmp_path: Path) -> None:
    codec = word_pieces(tmp_path)
    assert grown(codec, ["e", "<0xC3>", "<0xA9>", "e"], ["Once"]) == "e\u00e9e"
    assert grown(codec, ["<0x65>", "<0xF1>", "<0xDF>", "e", "<0x82>"], ["Once"]) == "e\ufffd\ufffde\ufffd"
    seeded = random.Random(0)
    for _ in range(300):
        words = [seeded.choice(["e", "▁time", f"<0x{seeded.randrange(256):02X}>"]) for _ in range(12)]
        grown(codec, words, ["Once"])


def test_more_buckets_than_torch_recompiles_are_captured_and_threads_recompile_nothing() -> None:
    def step(size: int) -> Callable[[], torch.Tensor]:
        square = torch.full((size, size), float(size))
        return lambda: square @ square

    graphs = CompiledGraphs()
    with torch.inference_mode():
        captured = [graphs.capture(step(size)) for size in range(1, 11)]
        compiled_frames = counters["stats"]["unique_graphs"]
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert [len(each.replay(None)) for each in captured] == list(range(1, 11))
        finally:
            torch.set_num_threads(threads)
    assert counters["stats"]["unique_graphs"] == compiled_frames


def test_a_numpy_prompt_is_token_ids(llm: LLM) -> None:
    listed, array = llm.generate([[1, 5, 7], np.array([1, 5, 7])], GREEDY)  # pyright: ignore[reportArgumentType]
    assert listed.outputs[0].token_ids == array.outputs[0].token_ids
    with pytest.raises(TextError):
        llm.engine.add(np.array([1.5]), GREEDY)  # pyright: ignore[reportArgumentType]


def test_a_text_that_can_not_be_made_ends_its_request_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = texts(llm, [B])[0]
    outputs = [llm.engine.add(A, GREEDY), llm.engine.add(B, GREEDY)]
    victim = llm.engine._texts[outputs[0].request_id]._texts[0]

    def broken(ids: list[int]) -> str:
        raise UnicodeError("planted")

    monkeypatch.setattr(victim.__class__, "push", _only_for(victim, broken))
    while not all(output.finished for output in outputs):
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert (outputs[0].outputs[0].finish_reason, "planted" in outputs[0].outputs[0].error) == ("error", True)
    assert outputs[1].outputs[0].text == alone


def _only_for(victim: Any, broken: Any) -> Any:
    real = victim.__class__.push
    return lambda self, ids: broken(ids) if self is victim else real(self, ids)


def test_a_dropped_ticket_does_not_block_the_worker(llm: LLM) -> None:
    import sglcore.schedule.step_loop as loop_module

    real = loop_module.record_batch_in_overlap

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(3):
        output = llm.engine.add(A, GREEDY)
        loop_module.record_batch_in_overlap = interrupted  # pyright: ignore[reportPrivateImportUsage]
        try:
            with pytest.raises(KeyboardInterrupt):
                while not output.finished:
                    llm.engine.step()
        finally:
            loop_module.record_batch_in_overlap = real
    assert texts(llm, [A])[0]
    assert not llm.engine.has_work


def test_a_closed_engine_refuses_and_has_let_go_of_its_memory() -> None:
    import gc
    import weakref

    llm = LLM(max_requests=1, threads=1)
    worker: Any = llm.started.worker
    model = weakref.ref(worker.runner.model.embed_tokens.weight)
    llm.close()
    llm.close()
    del worker
    gc.collect()
    assert model() is None
    assert "closed" in llm.generate(A, GREEDY)[0].outputs[0].error


def test_nothing_to_embed_and_odd_parameters(llm: LLM) -> None:
    with pytest.raises(TextError, match="SamplingParams"):
        llm.generate([A], {"max_tokens": 1})  # pyright: ignore[reportArgumentType]
    assert llm.generate([], GREEDY) == []
