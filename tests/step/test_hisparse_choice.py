"""The prediction whether hisparse pays: its formula by hand, and what it chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglcore.step.hisparse_choice import Choice, ModelBytes, Option, Speeds, Work, choose_option
from sglcore.step.hisparse_config import HiSparseConfig

GB = 1_000_000_000
SPEEDS = Speeds(link=50 * GB, memory=4000 * GB)
WORK = Work(request_tokens=32_000, hit_rate=0.9, is_assumed=True, chunk=8_000)
TOP_K, ROW, LAYERS = 2048, 656, 61
MODEL = ModelBytes(
    weights=84 * GB,
    read=LAYERS * (32_000 * 132 + TOP_K * ROW),
    entry=LAYERS * ROW,
    chosen=LAYERS * TOP_K * ROW,
)
"""An eighth of the weights of DeepSeek-V3.2, and its KV entries."""
RESIDENT = Option(None, 6)
ON = Option(HiSparseConfig(), 54, TOP_K, 2 * TOP_K)


def chosen(
    options: list[Option], resident: Option = RESIDENT, speeds: Speeds = SPEEDS, work: Work = WORK
) -> tuple[HiSparseConfig | None, Choice]:
    return choose_option(resident, options, MODEL, speeds, work)


def test_the_formula_is_what_the_module_says() -> None:
    step = (84 * GB + 6 * MODEL.read) / (4000 * GB)
    assert RESIDENT.tokens_per_second(MODEL, SPEEDS, WORK) == pytest.approx(6 / step)
    step = (84 * GB + 54 * MODEL.read) / (4000 * GB) + 54 * MODEL.chosen * 0.1 / (50 * GB)
    prompt = MODEL.entry * 28_000 / (50 * GB)
    found = ON.tokens_per_second(MODEL, SPEEDS, WORK)
    assert found == pytest.approx(1 / (step / 54 + prompt / 4_000))
    again = (28_000**2 - 10_000**2) / 16_000
    shorter = replace(ON, hisparse=HiSparseConfig(prompt_buffer_size=10_000))
    prompt = MODEL.entry * (28_000 + again) / (50 * GB)
    assert shorter.tokens_per_second(MODEL, SPEEDS, WORK) == pytest.approx(1 / (step / 54 + prompt / 4_000))


@pytest.mark.parametrize(
    ("places", "tokens", "ratio", "share"),
    [(4096, 32_000, 1, 0.1), (2048, 32_000, 1, 0.2), (8192, 32_000, 1, 0.05), (4096, 4096, 1, 0), (4096, 16_384, 4, 0)],
)
def test_fewer_places_miss_more_and_a_request_that_fits_misses_nothing(
    places: int, tokens: int, ratio: int, share: float
) -> None:
    option = Option(HiSparseConfig(), 1, TOP_K, places, ratio)
    assert option.missed(replace(WORK, request_tokens=tokens)) == pytest.approx(share)
    assert option.missed(replace(WORK, request_tokens=10**6, hit_rate=0.0)) == min(1.0, 2 * TOP_K / places)


def test_it_pays_where_it_lets_many_more_requests_run() -> None:
    found, choice = chosen([ON])
    assert found == HiSparseConfig() and not choice.is_smaller
    assert choice.tokens_per_second > 3 * choice.resident_tokens_per_second


def test_it_is_left_off_where_as_many_requests_fit_without_it() -> None:
    """As public measurements say of small batches: some percent slower."""
    for requests in (1, 4, 54):
        found, choice = chosen([replace(ON, requests=requests)], replace(RESIDENT, requests=requests))
        assert found is None and not choice.is_smaller
        assert 0.5 < choice.tokens_per_second / choice.resident_tokens_per_second < 1


@pytest.mark.parametrize(
    "changes",
    [
        {"speeds": Speeds(0.3 * GB, 4000 * GB)},
        {"work": replace(WORK, hit_rate=0.0), "speeds": Speeds(5 * GB, 4000 * GB)},
    ],
    ids=["slow link", "no hits"],
)
def test_it_is_left_off_where_copies_take_longer_than_more_requests_gain(changes: dict) -> None:
    assert chosen([ON], **changes)[0] is None


def test_it_is_left_off_where_nothing_fits() -> None:
    assert chosen([replace(ON, requests=0)])[0] is None
    assert chosen([replace(ON, requests=0)], replace(RESIDENT, requests=0))[0] is None


def test_it_is_used_where_a_request_fits_only_with_it() -> None:
    assert chosen([ON], replace(RESIDENT, requests=0))[0] == HiSparseConfig()


def test_buffers_shrink_where_more_requests_fit_then() -> None:
    smaller = HiSparseConfig(device_buffer_size=TOP_K)
    options = [replace(ON, requests=7), Option(smaller, 54, TOP_K, TOP_K)]
    found, choice = chosen(options)
    assert found == smaller and choice.is_smaller and choice.best.requests == 54


def test_buffers_do_not_shrink_for_less_than_a_gain() -> None:
    options = [ON, Option(HiSparseConfig(device_buffer_size=TOP_K), 55, TOP_K, TOP_K)]
    found, choice = chosen(options)
    assert found == HiSparseConfig() and not choice.is_smaller


def test_the_ledger_says_from_which_figures() -> None:
    _, choice = chosen([ON])
    text = choice.why(SPEEDS, WORK)
    for figure in (
        "54 requests",
        "for 6 with all",
        "50 GB/s from the host",
        "4e+03 GB/s",
        "32000 tokens",
        "90%, assumed",
    ):
        assert figure in text
    assert "90%, given" in choice.why(SPEEDS, replace(WORK, is_assumed=False))
