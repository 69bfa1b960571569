"""With hisparse, the `openai` client sees the same as without, also under concurrent requests;
prompts hit the prefix cache of others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcore.config.server_config import ServerConfig
from tests.deepseek_v4 import deepseek_v4, with_published_names
from tests.laws.engine import random_prompts
from tests.serving.chat.checkpoints import FAMILIES, make_codec
from tests.serving.in_process import served_here

AT_ONCE, PAGE, TOP_K, LONG = 64, 16, 8, 60
SIZES: Any = {
    "attention_backend": "compressed",
    "dtype": "float32",
    "graph": "off",
    "max_model_len": 160,
    "max_requests": 12,
    "page_size": PAGE,
    "threads": 1,
}
NAMED = ServerConfig(served_model_name=("v4",))
FEW_ROWS = f'{{"device_buffer_size": {TOP_K}}}'
"""The number of rows that a token reads: each token's choice evicts that of another."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V4."""
    found, family = tmp_path_factory.mktemp("hisparse"), FAMILIES["deepseek bare"]
    codec = make_codec(found, family.template, family.special, family.added)
    model = deepseek_v4(vocab_size=codec.tokenizer.get_vocab_size(), max_position_embeddings=512)
    return with_published_names(model, found)


def prompts() -> list[list[int]]:
    """Prompts with a few shared beginnings of some pages; their lengths are far below, at and above
    the number of rows that a token reads."""
    beginnings = random_prompts(4, (LONG, 33, 48, 7))
    return [beginnings[place % 4] + tail for place, tail in enumerate(random_prompts(5, range(1, AT_ONCE + 1)))]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def asked(client: openai.OpenAI, prompt: list[int]) -> tuple[str, list[float], int]:
    """Text and log-probabilities of some greedy tokens, and the number of cached prompt tokens."""
    given: Any = {"model": "v4", "prompt": prompt, "max_tokens": 6, "temperature": 0.0, "logprobs": 1}
    answer = client.completions.create(**given, extra_body={"ignore_eos": True})
    (choice,), usage = answer.choices, answer.usage
    assert usage is not None and usage.completion_tokens == 6 and choice.logprobs is not None
    details, scores = usage.prompt_tokens_details, choice.logprobs.token_logprobs
    assert scores is not None
    return choice.text, scores, (details.cached_tokens or 0) if details is not None else 0


def counters(url: str) -> dict[str, float]:
    """Metrics by name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for each in family.samples:
            found[each.name] = found.get(each.name, 0.0) + each.value
    return found


@contextmanager
def asked_by_all(folder: Path, **settings: Any) -> Iterator[tuple[list[tuple[str, list[float], int]], str]]:
    """The answers to `AT_ONCE` concurrent clients, and the server's address."""
    with served_here(folder, NAMED, **SIZES, **settings) as url, client_of(url) as client:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(partial(asked, client), prompts()))
        yield found, url


def test_as_many_at_once_are_told_the_same_and_find_whole_pages_of_each_other(folder: Path) -> None:
    """Including pages of earlier requests; the last token of a prompt is always computed."""
    with asked_by_all(folder, prefix_cache=False) as (wanted, url):
        assert not counters(url)["sglcore_hisparse_rows_total"]
    with asked_by_all(folder, hisparse=FEW_ROWS) as (found, url):
        seen, longer = counters(url), prompts()[0]
        with client_of(url) as client:
            cached = [asked(client, each)[2] for each in (longer, longer[:48], longer[:47], longer[1:])]
        stats, audit = (httpx.get(f"{url}/server_info/{name}").json() for name in ("stats", "audit"))
    for (text, scores, there), (right, right_scores, none) in zip(found, wanted, strict=True):
        assert text == right and scores == pytest.approx(right_scores, abs=5e-5)
        assert none == 0 == there % PAGE
    assert 0 < stats["hisparse_hits"] < stats["hisparse_rows"] and not audit["problems"]
    assert 0 < seen["sglcore_hisparse_hits_total"] < seen["sglcore_hisparse_rows_total"]
    assert sum(there for *_, there in found) == seen["sglcore_prefix_cache_hits_tokens_total"] > 20 * PAGE
    assert cached == [(len(longer) - 1) // PAGE * PAGE, 32, 32, 0]
