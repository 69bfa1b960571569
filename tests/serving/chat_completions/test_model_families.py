"""Every model family through the server, by the `openai` client: log-probabilities, streams,
response formats, and calls if the family has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from tests import checkpoints as models
from tests.deepseek_v4 import deepseek_v4, with_published_names
from tests.laws.test_pooling_laws import write_modules
from tests.laws.test_prompt_embeds import qwen3_vl, qwen25_vl
from tests.serving.chat.checkpoints import FAMILIES, make_codec
from tests.serving.conftest import SCHEMA, TOOLS
from tests.serving.in_process import served_here

MESSAGES: Any = [{"role": "user", "content": "Rain?"}]
GREEDY: Any = {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 10}
CONTEXT = 2048
IDS = [5, 77, 130, 9, 64, 200, 31, 8, 5, 77, 111, 90, 14, 33, 250, 71, 2, 19]


def olmoe(**changes: Any) -> Any:
    """An OLMoE, which runs by transformers' class."""
    sizes = {**models.SIZES, "num_experts": 5, "num_experts_per_tok": 2, **changes}
    return models.make_oracle(transformers.OlmoeConfig(**sizes), "OlmoeForCausalLM")


def published_gpt_oss(**changes: Any) -> Any:
    """A gpt-oss with sizes that MXFP4 experts need."""
    return models.gpt_oss(hidden_size=64, intermediate_size=64, **changes)


@dataclass(frozen=True)
class Served:
    """A model, its chat format, and the function that writes its checkpoint."""

    make: Callable[..., Any]
    chat: str = "plain"
    thinks: bool = False
    """Whether the template opens reasoning."""
    save: Callable[[Any, Path], Path] = models.save


MODELS = {
    "deepseek-v4": Served(deepseek_v4, "deepseek bare", save=with_published_names),
    "gemma": Served(models.gemma),
    "gemma2": Served(models.gemma2),
    "gemma3": Served(models.gemma3, "functiongemma"),
    "mixtral": Served(models.mixtral, "mistral list"),
    "qwen2-moe": Served(models.qwen2_moe, "hermes"),
    "qwen3-moe": Served(models.qwen3_moe, "coder"),
    "qwen3-next": Served(models.qwen3_next, "thinking", thinks=True),
    "qwen3.5": Served(models.qwen35, "coder"),
    "qwen2.5-vl": Served(qwen25_vl, "hermes"),
    "qwen3-vl": Served(qwen3_vl, "hermes"),
    "glm": Served(models.glm),
    "glm4": Served(models.glm4),
    "glm4-moe": Served(models.glm4_moe, "glm close", thinks=True),
    "gpt-oss": Served(published_gpt_oss, "harmony", save=models.with_mxfp4_experts),
    "phi3": Served(models.phi3, "phi"),
    "granite": Served(models.granite, "granite thinking"),
    "granite-moe": Served(models.granite_moe, "granite"),
    "granite-hybrid": Served(models.granite_hybrid, "hermes"),
    "olmo2": Served(models.olmo2),
    "olmo3": Served(models.olmo3),
    "lfm2": Served(models.lfm2, "lfm2"),
    "lfm2-moe": Served(models.lfm2_moe, "lfm2 json"),
    "nemotron-h": Served(models.nemotron_h, "nemotron", thinks=True),
    "exaone4": Served(models.exaone4, "hermes"),
    "olmoe": Served(olmoe),
    "mamba2": Served(models.mamba2),
}
"""The families with native models, and three that run by transformers' classes."""


def write(folder: Path, served: Served) -> tuple[Any, Any]:
    """Write a tiny checkpoint with a tokenizer and a chat template; return its model and codec."""
    family = FAMILIES[served.chat]
    codec = make_codec(folder, family.template, family.special, family.added)
    start, end = (codec.tokenizer.token_to_id(text) for text in ("<s>", family.special[-1]))
    sizes = {"vocab_size": codec.tokenizer.get_vocab_size(), "max_position_embeddings": CONTEXT}
    ids = {"pad_token_id": start, "bos_token_id": start, "eos_token_id": end}
    model = served.make(**{name: size for name, size in (sizes | ids).items() if accepts(served.make, name)})
    served.save(model, folder)
    return model, codec


def accepts(make: Callable[..., Any], name: str) -> bool:
    """Models without attention have no context limit."""
    return make is not models.mamba2 or name != "max_position_embeddings"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A client to copy for each server: a copy with another address is cheap."""
    with openai.OpenAI(base_url="http://nowhere", api_key="unused", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_served(name: str, client: openai.OpenAI, tmp_path: Path) -> None:
    served = MODELS[name]
    model, codec = write(tmp_path, served)
    with served_here(tmp_path, dtype="float32", threads=1, max_requests=4, max_model_len=CONTEXT, graph="off") as url:
        here = client.with_options(base_url=f"{url}/v1")
        check_numbers(here, tmp_path.name, model)
        check_chats(here, tmp_path.name, served, codec)


def check_numbers(client: openai.OpenAI, name: str, model: Any) -> None:
    """Check a prompt's log-probabilities against transformers'."""
    found = client.completions.create(model=name, prompt=IDS, echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    wanted = models.oracle_logprobs(model, IDS)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs.token_logprobs[1 : len(IDS)], wanted, atol=2e-4)


def check_chats(client: openai.OpenAI, name: str, served: Served, codec: Any) -> None:
    """Check concurrently: an answer whole and streamed, a response format, and a call."""
    create: Any = client.chat.completions.create
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(create, model=name, logprobs=True, **GREEDY)
        others = [pool.submit(check, create, name, served, codec) for check in (check_form, check_call)]
        streamed = told(client, name)
        whole = answer.result()
        for each in others:
            each.result()
    message = whole.choices[0].message
    assert streamed == (message.content or "", message.to_dict().get("reasoning_content") or "")
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    if served.thinks:
        assert streamed[1]


def told(client: openai.OpenAI, name: str) -> tuple[str, str]:
    """The content and the reasoning of a streamed answer."""
    parts: list[Any] = [
        choice.delta.to_dict()
        for part in client.chat.completions.create(model=name, stream=True, **GREEDY)
        for choice in part.choices
    ]
    content, reasoning = ("".join(part.get(key) or "" for part in parts) for key in ("content", "reasoning_content"))
    return content, reasoning


def forced(codec: Any) -> dict[str, Any]:
    """Sampling parameters that end open reasoning at once; a random model would not end it."""
    mark = codec.tokenizer.token_to_id("</think>")
    return {"max_tokens": 300, "seed": 5, "logit_bias": {} if mark is None else {str(mark): 100}}


def check_form(create: Any, name: str, served: Served, codec: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    given = forced(codec)
    given["extra_body"] = {**given.get("extra_body", {}), "thinking_token_budget": 0}
    answer = create(model=name, messages=MESSAGES, response_format=form, **given)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")


def check_call(create: Any, name: str, served: Served, codec: Any) -> None:
    """Check a call of the named tool and the return of its result; a family without tools must
    refuse."""
    given = {"model": name, "tools": TOOLS, **forced(codec)}
    choice = {"type": "function", "function": {"name": "weather"}}
    if FAMILIES[served.chat].tools is None:
        with pytest.raises(openai.BadRequestError, match="no place for tools"):
            create(messages=MESSAGES, tool_choice=choice, **given)
        return
    message = create(messages=MESSAGES, tool_choice=choice, **given).choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    talk = [*MESSAGES, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
    assert create(messages=talk, **{**given, "max_tokens": 2}).usage.prompt_tokens > len("wet")


def of_tokens(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean(0)


def of_the_last(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[-1]


def qwen3_embedding(**changes: Any) -> Any:
    return models.qwen3(**changes).model


def save_for_sentences(model: Any, folder: Path) -> Path:
    write_modules(folder, "lasttoken", normalize=True)
    return models.save(model, folder)


def roberta(**changes: Any) -> Any:
    return models.roberta("RobertaModel", **changes)


def cross_encoder(**changes: Any) -> Any:
    return models.roberta("XLMRobertaForSequenceClassification", num_labels=1, **changes)


EMBEDDERS = {
    "roberta": (Served(roberta), of_tokens),
    "xlm-roberta": (Served(models.roberta), of_tokens),
    "modernbert": (Served(models.modernbert), of_tokens),
    "qwen3-embedding": (Served(qwen3_embedding, save=save_for_sentences), of_the_last),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_served(name: str, client: openai.OpenAI, tmp_path: Path) -> None:
    served, pool = EMBEDDERS[name]
    model, codec = write(tmp_path, served)
    texts = ["Rain?", "A fox ran through the forest."]
    with served_here(tmp_path, dtype="float32", threads=1) as url:
        here = client.with_options(base_url=f"{url}/v1")
        found = here.embeddings.create(model=tmp_path.name, input=texts, encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="answers with vectors, and generates no text; use /v1/emb"):
            here.completions.create(model=tmp_path.name, prompt="Rain?")
    for text, each in zip(texts, found.data, strict=True):
        with torch.no_grad():
            wanted = pool(model.base_model(torch.tensor([codec.encode(text)])).last_hidden_state[0])
        np.testing.assert_allclose(each.embedding, wanted / wanted.norm(), atol=1e-4)


def test_a_cross_encoder_has_no_vectors_and_says_so(client: openai.OpenAI, tmp_path: Path) -> None:
    write(tmp_path, Served(cross_encoder))
    with served_here(tmp_path, dtype="float32", threads=1) as url:
        here = client.with_options(base_url=f"{url}/v1")
        with pytest.raises(
            openai.BadRequestError, match="has a classification head; wanted one that embeds; use /v1/score"
        ):
            here.embeddings.create(model=tmp_path.name, input="Rain?")
        with pytest.raises(openai.BadRequestError, match="answers with scores, and generates no text; use /v1/score"):
            here.completions.create(model=tmp_path.name, prompt="Rain?")
