"""The offline API, compared with transformers on the embedded model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglcore import LLM, PromptEmbeds, SamplingParams
from sglcore.sampling.grammar_spec import Grammar

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is", "def add(a, b):", "2 + 3 ="]


def their_tokens(oracle: Any, ids: list[int], count: int, **options: Any) -> list[int]:
    with torch.no_grad():
        out = oracle.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
    return out[0, len(ids) :].tolist()


def their_logprobs(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_greedy_text_of_a_batch_is_that_of_transformers_one_by_one(llm: LLM, oracle: Any) -> None:
    for output in llm.generate(PROMPTS, GREEDY):
        assert output.outputs[0].token_ids == their_tokens(oracle, output.prompt_token_ids, 64)


def test_logprobs_with_alternatives_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=3, ignore_eos=True)
    output = llm.generate(PROMPTS[0], params)[0]
    ids, start = output.prompt_token_ids + output.outputs[0].token_ids, len(output.prompt_token_ids)
    expected = their_logprobs(oracle, ids)
    found = output.outputs[0].logprobs
    assert found is not None and len(found) == 20
    for place, item in enumerate(found):
        row = expected[start + place - 1]
        assert item.token_id == ids[start + place]
        assert abs(item.logprob - float(row[item.token_id])) < 2e-4
        assert item.rank == int((row > row[item.token_id]).sum()) + 1
        assert [token for token, _ in item.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("chunk", [3, 7, 2048])
def test_prompt_logprobs_do_not_depend_on_chunks(oracle: Any, chunk: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    with LLM(dtype="float32", max_requests=2, threads=1, max_batch_tokens=chunk, max_model_len=256) as llm:
        prompt = "Once upon a time there was a fox. One day the fox found a key."
        for _ in range(2):  # the second time the prompt is in the prefix cache
            output = llm.generate(prompt, params)[0]
            expected = their_logprobs(oracle, output.prompt_token_ids)
            scores = output.prompt_logprobs
            assert scores is not None and len(scores) == len(output.prompt_token_ids) and scores[0] is None
            for place, score in enumerate(scores[1:], 1):
                assert score is not None and score.token_id == output.prompt_token_ids[place]
                assert abs(score.logprob - float(expected[place - 1, score.token_id])) < 2e-4
                assert len(score.top) == 2


def test_samples_of_one_prompt_share_its_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=2, prompt_logprobs=0)
    output = llm.generate(PROMPTS[0], params)[0]
    scores = output.prompt_logprobs
    assert scores is not None and [score and score.token_id for score in scores] == [None, *output.prompt_token_ids[1:]]


def test_streamed_pieces_add_up_to_the_generated_text(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, seed=11, max_tokens=80)
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    deltas = list(llm.stream(PROMPTS[0], params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason


def test_a_closed_stream_gives_its_slot_and_pages_back(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    stats = llm.engine.scheduler.stats()
    assert stats.running == stats.waiting == stats.in_flight == 0
    llm.engine.scheduler.audit()


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    word = whole[20:26]
    cut = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=64, stop=(word,), ignore_eos=True))[0]
    assert cut.outputs[0].text == whole[: whole.index(word)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_cause) == ("stop", word)
    params = SamplingParams(
        temperature=0.0, max_tokens=64, stop=(word,), include_stop_str_in_output=True, ignore_eos=True
    )
    kept = "".join(delta.text for delta in llm.stream(PROMPTS[0], params))
    assert kept == whole[: whole.index(word) + len(word)]


def test_a_stop_token_ends_the_text_and_is_not_shown(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    token = whole.token_ids[9]
    place = whole.token_ids.index(token)
    cut = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, stop_token_ids=(token,), ignore_eos=True))[0]
    assert cut.outputs[0].token_ids == whole.token_ids[: place + 1]
    assert cut.outputs[0].stop_cause == token
    assert cut.outputs[0].text == llm.engine.codec.decode(whole.token_ids[:place])


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_in_another_engine(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=1234, n=2, max_tokens=40, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params)[0]
    mixed = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], [GREEDY, params, SamplingParams(temperature=0.5)])[1]
    with LLM(
        dtype="float32", max_requests=2, threads=1, max_batch_tokens=5, overlap=False, prefix_cache=False, page_size=4
    ) as other:
        elsewhere = other.generate(PROMPTS[0], params)[0]
    texts = [[completion.text for completion in output.outputs] for output in (alone, mixed, elsewhere)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_a_request_without_a_seed_reports_one_that_repeats_it(llm: LLM) -> None:
    first = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=30))[0].outputs[0]
    second = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=30))[0].outputs[0]
    again = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=30, seed=first.seed))[0].outputs[0]
    assert first.seed != second.seed
    assert again.text == first.text


def test_repetition_penalty_is_that_of_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.3, ignore_eos=True)
    output = llm.generate([PROMPTS[1], PROMPTS[0]], params)[1]
    expected = their_tokens(oracle, output.prompt_token_ids, 40, repetition_penalty=1.3)
    assert output.outputs[0].token_ids == expected


def test_frequency_and_presence_penalties_follow_the_formula(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=25, frequency_penalty=0.7, presence_penalty=0.9, ignore_eos=True
    )
    output = llm.generate(PROMPTS[0], params)[0]
    ids, drawn = list(output.prompt_token_ids), list[int]()
    for _ in range(25):
        with torch.no_grad():
            logits = oracle(torch.tensor([ids + drawn])).logits[0, -1]
        counts = torch.bincount(torch.tensor(drawn, dtype=torch.int64), minlength=len(logits)).float()
        drawn.append(int((logits - 0.7 * counts - 0.9 * (counts > 0)).argmax()))
    assert output.outputs[0].token_ids == drawn


def test_a_logit_bias_forces_and_forbids_tokens(llm: LLM) -> None:
    forced = SamplingParams(temperature=1.0, max_tokens=5, logit_bias={77: 100.0}, ignore_eos=True)
    assert llm.generate(PROMPTS[0], forced)[0].outputs[0].token_ids == [77] * 5


def test_min_tokens_keeps_the_end_away(llm: LLM) -> None:
    eos = next(iter(llm.engine.eos_ids))
    wish = {eos: 100.0}
    short = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20, logit_bias=wish))[0].outputs[0]
    longer = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20, logit_bias=wish, min_tokens=7))[
        0
    ].outputs[0]
    assert (len(short.token_ids), short.finish_reason) == (1, "stop")
    assert (len(longer.token_ids), longer.finish_reason) == (8, "stop")


def test_a_prompt_that_can_not_run_does_not_touch_the_others(llm: LLM) -> None:
    alone = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    good, too_long, empty, foreign = llm.generate([PROMPTS[0], [5] * 5000, [], [5, 10**6]], GREEDY)
    assert good.outputs[0].text == alone
    assert too_long.outputs[0].finish_reason == "error" and "5000" in too_long.outputs[0].error
    assert empty.outputs[0].finish_reason == "error" and "empty" in empty.outputs[0].error
    assert foreign.outputs[0].finish_reason == "error" and "1000000" in foreign.outputs[0].error
    (raw,) = llm.generate(b"text", GREEDY)  # pyright: ignore[reportArgumentType]
    assert raw.outputs[0].finish_reason == "error" and "a prompt is bytes" in raw.outputs[0].error


def test_embeddings_in_place_of_tokens_give_what_the_tokens_give(llm: LLM, oracle: Any) -> None:
    """The token ids given with them are used for penalties and for the prompt's
    log-probabilities."""
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    scored = replace(plain, repetition_penalty=1.3, prompt_logprobs=0)
    ids = llm.generate(PROMPTS[0], plain)[0].prompt_token_ids
    rows = oracle.get_input_embeddings()(torch.tensor(ids)).detach().numpy()
    for params, prompt in ((plain, PromptEmbeds(rows)), (scored, PromptEmbeds(rows, ids))):
        (found,), wanted = llm.generate(prompt, params), llm.generate(PROMPTS[0], params)[0]
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert found.prompt_token_ids == ids
    scores = [[each.logprob for each in (output.prompt_logprobs or ()) if each] for output in (found, wanted)]
    assert len(scores[0]) == len(ids) - 1
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)
    good, refused = llm.generate([PromptEmbeds(rows), PromptEmbeds(rows[:, 1:])], plain)
    assert good.outputs[0].finish_reason == "length"
    assert refused.outputs[0].finish_reason == "error" and "numbers per token" in str(refused.outputs[0].error)


def test_generation_ends_at_the_context(llm: LLM) -> None:
    limit = llm.started.worker.limits.max_model_len
    prompt = [5 + i % 50 for i in range(limit - 10)]
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0]
    assert output.outputs[0].finish_reason == "length"
    assert len(prompt) + len(output.outputs[0].token_ids) == limit


def test_a_chat_prompt_is_the_one_of_transformers(llm: LLM) -> None:
    from transformers import AutoTokenizer

    from sglcore.engine.start import embedded_model

    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert llm.chat_prompt(messages) == expected
    assert llm.chat(messages, SamplingParams(temperature=0.0)).outputs[0].finish_reason == "stop"


def test_requests_under_a_schema_that_is_not_enforced_whole_keep_their_ids(llm: LLM) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)a"}}}'
    params = SamplingParams(temperature=0.0, max_tokens=4, grammar=Grammar("json_schema", schema))
    with pytest.warns(UserWarning, match="not held to #/properties/a/pattern's look-around"):
        outputs = [llm.engine.add(prompt, params) for prompt in PROMPTS[:2]]
    for output in outputs:
        llm.engine.abort(output.request_id)
    assert len({output.request_id for output in outputs}) == 2 and all(output.finished for output in outputs)


def test_concurrent_prompts_share_their_prefix(llm: LLM) -> None:
    prefix = [7 + i % 90 for i in range(160)]
    llm.generate([prefix + [3]], SamplingParams(temperature=0.0, max_tokens=1))
    output = llm.generate([prefix + [4, 5]], SamplingParams(temperature=0.0, max_tokens=4, logprobs=0))[0]
    assert output.cached_tokens == 160
    fresh = llm.generate(
        [prefix + [4, 5]], SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, prompt_logprobs=0)
    )[0]
    assert output.outputs[0].token_ids == fresh.outputs[0].token_ids
    theirs, ours = fresh.outputs[0].logprobs, output.outputs[0].logprobs
    assert theirs is not None and ours is not None
    np.testing.assert_allclose([item.logprob for item in ours], [item.logprob for item in theirs], atol=2e-4)


def test_compiled_decode_in_the_checkpoints_own_dtype_scores_as_eager_does() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    runs = []
    for graph in ("off", "compiled"):
        with LLM(max_requests=1, threads=1, graph=graph, graph_buckets=(1,)) as llm:
            runs.append(llm.generate(PROMPTS[0], params)[0].outputs[0])
            linear = next(row for row in llm.ledger.rows if row.topic == "linear")
            assert graph == "off" or linear.effective == "plain"
    eager, compiled = runs
    same = next((i for i, pair in enumerate(zip(*(r.token_ids for r in runs), strict=True)) if len(set(pair)) > 1), 12)
    assert same > 2
    for mine, theirs in zip((eager.logprobs or [])[:same], (compiled.logprobs or [])[:same], strict=True):
        assert abs(mine.logprob - theirs.logprob) < 0.1
