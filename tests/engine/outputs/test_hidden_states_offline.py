"""Hidden states of the offline API: those of transformers for the embedded model, whole and as they
come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglcore import LLM, PromptEmbeds, SamplingParams
from sglcore.sampling.params import SamplingError
from tests.laws.hidden import their_states

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is"]


def check(states: Any, oracle: Any, ids: list[int], before: bool = False) -> None:
    """The states are those of all these tokens but the last."""
    wanted = their_states(oracle, ids[:-1], before)
    assert states is not None and states.shape == wanted.shape and states.dtype == np.float32
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(states / scale, wanted / scale, atol=2e-4, rtol=0)


@pytest.mark.parametrize("asked", [True, "all"])
@pytest.mark.parametrize("before", [False, True])
def test_each_sample_has_the_states_of_its_prompt_and_its_output(
    llm: LLM, oracle: Any, asked: bool | str, before: bool
) -> None:
    params = replace(GREEDY, temperature=1.0, seed=4, n=2)
    if before:
        params = replace(params, return_hidden_states="last", return_hidden_states_before_norm=True)
    for output in llm.generate(PROMPTS, params, return_hidden_states=asked):
        assert output.outputs[0].token_ids != output.outputs[1].token_ids
        for sample in output.outputs:
            check(sample.hidden_states, oracle, output.prompt_token_ids + sample.token_ids, before)


def test_the_last_state_is_the_one_from_which_the_last_token_was_drawn(llm: LLM, oracle: Any) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY, return_hidden_states="last")
    (sample,) = output.outputs
    assert sample.hidden_states is not None and sample.hidden_states.shape[0] == 1
    logits = oracle.lm_head(torch.from_numpy(sample.hidden_states))[0]
    assert int(logits.argmax()) == sample.token_ids[-1]


def test_no_one_has_states_who_did_not_ask(llm: LLM) -> None:
    asking = replace(GREEDY, return_hidden_states="all")
    asked, plain = llm.generate(PROMPTS, [asking, GREEDY])
    assert asked.outputs[0].hidden_states is not None and plain.outputs[0].hidden_states is None
    for off in (False, None):
        (found,) = llm.generate(PROMPTS[0], GREEDY if off is None else asking, return_hidden_states=off)
        assert found.outputs[0].hidden_states is None


def test_they_change_no_token(llm: LLM) -> None:
    params = replace(GREEDY, temperature=1.0, seed=9, max_tokens=30)
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, return_hidden_states=asked)]
        for asked in (None, True, "last")
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ["all", "last"])
def test_a_stream_brings_them_with_their_tokens(llm: LLM, oracle: Any, kind: str) -> None:
    params = replace(GREEDY, return_hidden_states=kind)
    ids = llm.prompt(PROMPTS[0])
    deltas = list(llm.stream(PROMPTS[0], params))
    text = ids + [token for delta in deltas for token in delta.token_ids]
    found = [delta.hidden_states for delta in deltas]
    if kind == "last":
        assert [each is None for each in found] == [True] * (len(found) - 1) + [False]
        last = found[-1]
        assert last is not None
        np.testing.assert_allclose(last, their_states(oracle, text[:-1])[-1:], atol=5e-3)
        return
    assert [0 if each is None else len(each) for each in found] == [len(ids), *[1] * 7]
    check(np.concatenate([each for each in found if each is not None]), oracle, text)


def test_a_stop_string_in_the_middle_of_a_run_cuts_them(llm: LLM, oracle: Any) -> None:
    text = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=20))[0].outputs[0].text
    params = replace(GREEDY, max_tokens=20, stop=(text[12:15],))
    (output,) = llm.generate(PROMPTS[0], params, return_hidden_states=True)
    (sample,) = output.outputs
    assert sample.finish_reason == "stop" and len(sample.token_ids) < 20
    check(sample.hidden_states, oracle, output.prompt_token_ids + sample.token_ids)


def test_prompts_of_embeddings_have_states(llm: LLM, oracle: Any) -> None:
    ids = llm.prompt(PROMPTS[0])
    rows = oracle.get_input_embeddings()(torch.tensor(ids)).detach().numpy()
    (output,) = llm.generate(PromptEmbeds(rows), GREEDY, return_hidden_states=True)
    check(output.outputs[0].hidden_states, oracle, ids + output.outputs[0].token_ids)


def test_what_is_said_about_them_is_checked() -> None:
    assert SamplingParams(return_hidden_states=True).return_hidden_states == "all"  # pyright: ignore[reportArgumentType]
    assert SamplingParams(return_hidden_states=False).return_hidden_states is None  # pyright: ignore[reportArgumentType]
    for wrong in ("first", 1, 2.0, ["all"], b"all"):
        with pytest.raises(SamplingError, match='return_hidden_states: found .*wanted True, False, "last" or "all"'):
            SamplingParams(return_hidden_states=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SamplingError, match="return_hidden_states_before_norm: found True"):
        SamplingParams(return_hidden_states_before_norm=True)


def test_an_error_names_no_states_and_a_prompt_that_cannot_run_hurts_no_other(llm: LLM, oracle: Any) -> None:
    good, bad = llm.generate([PROMPTS[0], [5] * 5000], GREEDY, return_hidden_states=True)
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].hidden_states is None
    check(good.outputs[0].hidden_states, oracle, good.prompt_token_ids + good.outputs[0].token_ids)


def test_a_compiled_decode_has_them_too(oracle: Any) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "max_requests": 2, "threads": 1}
    with LLM(graph="compiled", graph_buckets=(2,), **settings) as llm:
        for output in llm.generate(PROMPTS, GREEDY, return_hidden_states=True):
            check(output.outputs[0].hidden_states, oracle, output.prompt_token_ids + output.outputs[0].token_ids)
