"""SamplingParams refuses values that cannot be honoured, in one line that names the remedy."""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from sglcore.sampling import SamplingError, SamplingParams, fresh_seed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("xtc_probability", 1.01),
        ("xtc_threshold", -0.1),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", "."),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", 5),
        ("stop", ["a" * 4096, "b"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
        ("n", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_naming_found_wanted_and_remedy(name, value):
    with pytest.raises(SamplingError) as refusal:
        SamplingParams(**{name: value})
    message = str(refusal.value)
    assert name in message and "found" in message and "wanted" in message and ";" in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (1, None)),
        ("temperature", (0.0,)),
        ("top_k", (-1, 0)),
        ("top_p", (1e-9, 1.0)),
        ("min_p", (0.0, 1.0)),
        ("presence_penalty", (-2.0, 2.0)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("repetition_penalty", (1e-30, 1e30)),
        ("min_tokens", (0,)),
        ("logprobs", (0, None)),
        ("prompt_logprobs", (0, None)),
        ("n", (1,)),
        ("seed", (0, 2**64 - 1, None)),
    ],
)
def test_the_ends_of_a_range_are_in_it(name, values):
    assert [getattr(SamplingParams(**{name: value}), name) for value in values] == list(values)


def test_a_huge_bad_value_does_not_flood_the_message():
    with pytest.raises(SamplingError) as refusal:
        SamplingParams(stop_token_ids=["x" * 10000])  # type: ignore[list-item]
    assert len(str(refusal.value)) < 300


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(SamplingError, match="raise max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=None, min_tokens=4).max_tokens is None
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


def test_repetitions_are_looked_for_only_where_they_could_change_a_logit():
    asked = {"dry_multiplier": 0.8, "dry_penalty_last_n": 64}
    assert SamplingParams(**asked).repetition is not None
    for off in ({"dry_multiplier": 0.0}, {"dry_penalty_last_n": 0}):
        assert SamplingParams(**{**asked, **off}).repetition is None


def test_lists_are_frozen_to_tuples_and_a_string_stop_is_one_stop():
    given = ["a", "b"]
    params = SamplingParams(stop=given, stop_token_ids=[3, 1])  # type: ignore[arg-type]
    given.append("c")
    assert params.stop == ("a", "b") and params.stop_token_ids == (3, 1)
    assert SamplingParams(stop="word").stop == ("word",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_the_bias_is_a_read_only_copy():
    given = {5: 1, 2: -3.5}
    params = SamplingParams(logit_bias=given)
    given[9] = 1
    assert dict(params.logit_bias) == {2: -3.5, 5: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        params.temperature = 2.0  # type: ignore[misc]


def test_parameters_survive_pickle_and_copy_and_are_hashable():
    params = SamplingParams(logit_bias={1: 2.0}, stop=("x",), seed=2**64 - 1)
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(params) == hash(copy.copy(params))
    assert params != dataclasses.replace(params, seed=3)


@pytest.mark.parametrize(
    ("given", "greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 1e-5}, True),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
    ],
)
def test_greedy_is_temperature_zero_or_a_single_candidate(given: dict[str, Any], greedy: bool):
    assert SamplingParams(**given).is_greedy is greedy


def test_history_is_needed_only_for_penalties():
    assert not SamplingParams(logit_bias={1: 1.0}).needs_history
    penalties: tuple[dict[str, Any], ...]
    penalties = ({"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1})
    for given in penalties:
        assert SamplingParams(**given).needs_history


def test_fresh_seeds_are_valid_seeds_that_a_float_holds_and_differ():
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20 and all(SamplingParams(seed=seed).seed == seed < 2**53 for seed in seeds)


def test_importing_the_parameters_loads_neither_torch_nor_numpy():
    code = "import sglcore.sampling.params, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_host_twin_loads_no_torch():
    modules = "sglcore.sampling.params_batch, sglcore.sampling.reference_sampler"
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
