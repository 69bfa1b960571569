"""Encodes the inputs of embedding, scoring and classification, and computes the answers' numbers
from the model's vectors and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglcore.engine.core import prompted, read_prompt
from sglcore.engine.labels import read_labels
from sglcore.engine.tokenizers.text_codec import EncodedPair, TextCodec
from sglcore.serving.apis.checks import check_limit, check_model, check_ready, fingerprint
from sglcore.serving.apis.openai.body import as_prompts
from sglcore.serving.apis.pooling.body import ClassifyBody, EmbeddingBody, PoolingFields
from sglcore.serving.replicas.engine_frontend import LONG_TEXT, Frontend, Pooled
from sglcore.serving.replicas.server_errors import InvalidRequest, blame

Text = str | tuple[str, str] | list[int]
"""A text, a pair of texts, or token ids."""
UNIT = 1e-3
"""Maximum deviation from 1 of the length of a vector that counts as normalised."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer's numbers for a request to score or rerank: the score of each pair, in order, and
    the number of tokens that the model read. For cosines each different text is read once, however
    many pairs have it."""

    values: list[float]
    tokens: int


def described(frontend: Frontend, body: PoolingFields, tokens: int) -> dict[str, Any]:
    """Return the fields `model`, `system_fingerprint` and `usage` of an answer to a request with
    `tokens` input tokens in all. Raises InvalidRequest for a model name that is not served."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": check_model(frontend, body.model), "system_fingerprint": fingerprint(frontend), "usage": usage}


async def embedded(frontend: Frontend, body: EmbeddingBody) -> list[Pooled]:
    """Return the vectors of a body's inputs, in order, cut to the `dimensions` that it requests,
    and their numbers of tokens. Waits for the engine. Raises InvalidRequest if the model does not
    embed or is not served by that name, for too many inputs, an input that is too long, and
    `dimensions` above the model's; and NotReady."""
    inputs = as_prompts(body.input)
    _check(frontend, body, "input", len(inputs))
    _check_embeds(frontend)
    with blame("input"):
        texts: list[Any] = [prompted(frontend.codec, prompt, body.prompt_name) for prompt in inputs]
        found = await _pooled(frontend, texts, body.most)
    width = len(found[0].vector)
    if body.dimensions is not None and body.dimensions > width:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}", wanted=f"at most {width}, which this model has", param="dimensions"
        )
    return [Pooled(_shortened(each.vector, body.dimensions or width), each.tokens) for each in found]


async def scored(frontend: Frontend, body: PoolingFields, pairs: Sequence[tuple[str, str]], param: str) -> Scored:
    """Return how well the texts of each pair match: the output of the model's classification head
    if it has one label, else the cosine of their vectors. Waits for the engine. `param`: the field
    of the second texts, for errors. Raises InvalidRequest if the model does neither, for too many
    pairs and for a text that is too long; and NotReady."""
    _check(frontend, body, param, len(pairs))
    assert frontend.info is not None
    if frontend.info.limits["num_labels"] == 1:
        with blame(param):
            found = await _pooled(frontend, pairs, body.most)
        return Scored([float(each.vector[0]) for each in found], sum(each.tokens for each in found))
    _check_embeds(frontend)
    places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    with blame(param):
        found = await _pooled(frontend, list(places), body.most)
    values = [_cosine(found[places[first]].vector, found[places[second]].vector) for first, second in pairs]
    return Scored(values, sum(each.tokens for each in found))


async def shortened(frontend: Frontend, texts: Sequence[str], tokens: int) -> list[str]:
    """Return the beginning of each text, up to the end of its first `tokens` tokens; a text that
    has no more is returned whole.

    Long texts are tokenised in a thread, outside the event loop.
    """

    def first() -> list[str]:
        return [frontend.codec.first_tokens(text, tokens) for text in texts]

    return await asyncio.to_thread(first) if sum(map(len, texts)) > LONG_TEXT else first()


async def classified(frontend: Frontend, body: ClassifyBody) -> tuple[list[dict[str, Any]], int]:
    """Return label and probabilities of each input, in order, as values of the answer's `data`, and
    the number of tokens of all inputs. Waits for the engine. Raises InvalidRequest if the model has
    no classification head, for too many inputs and for one that is too long; and NotReady."""
    inputs = as_prompts(body.input)
    _check(frontend, body, "input", len(inputs))
    assert frontend.info is not None
    if not frontend.info.limits["num_labels"]:
        own = "/v1/completions" if frontend.info.generates else "/v1/embeddings"
        raise _wrong_model("has no labels", "one with a classification head", own, "model_does_not_classify")
    with blame("input"):
        found = await _pooled(frontend, inputs, body.most)
    labels = read_labels(frontend.model_path)
    rows = [labels.probabilities(each.vector) for each in found]
    data = [
        {"index": place, "label": labels.names[row.argmax()], "probs": row.tolist(), "num_classes": len(row)}
        for place, row in enumerate(rows)
    ]
    return data, sum(each.tokens for each in found)


async def _pooled(frontend: Frontend, texts: Sequence[Text], most: int | None) -> list[Pooled]:
    """Return the model's result for each text, in order; waits for all. A text is truncated to
    `most` tokens, or to the model's maximum if `most` is -1 or larger than that. None: a text above
    the maximum is refused.

    Long texts are tokenised in a thread, outside the event loop.
    """
    assert frontend.info is not None
    longest = frontend.longest_prompt(frontend.info, embeds=True)
    room = None if most is None else longest if most < 0 else min(most, longest)
    is_long = sum(map(_characters, texts)) > LONG_TEXT
    given = (frontend, texts, room, longest)
    return await frontend.pooled(await asyncio.to_thread(_encoded, *given) if is_long else _encoded(*given))


def _characters(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(len(part) for part in text if isinstance(part, str))


def _encoded(frontend: Frontend, texts: Sequence[Text], most: int | None, limit: int) -> list[EncodedPair]:
    return [_encode(frontend.codec, text, most, limit) for text in texts]


def _encode(codec: TextCodec, text: Text, most: int | None, limit: int) -> EncodedPair:
    if isinstance(text, list):
        return read_prompt(codec, text)[:most], None
    return codec.encode_texts(*((text,) if isinstance(text, str) else text), most=most, limit=limit)


def _check(frontend: Frontend, body: PoolingFields, param: str, texts: int) -> None:
    check_model(frontend, body.model)
    check_ready(frontend)
    check_limit(param, texts, frontend.config.max_prompts, "texts")


def _check_embeds(frontend: Frontend) -> None:
    """Raise InvalidRequest if the model generates text, or has a classification head: then it has
    no embeddings. `frontend.info` must not be None: `check_ready` must have passed."""
    assert frontend.info is not None
    if frontend.info.generates:
        raise _wrong_model(
            "generates text and has no embeddings",
            "an encoder, such as BERT, or this one with --task embed",
            "/v1/completions",
        )
    if frontend.info.limits["num_labels"]:
        raise _wrong_model("has a classification head", "one that embeds", "/v1/score for one label, or /classify")


def _wrong_model(found: str, wanted: str, own: str, code: str = "model_does_not_embed") -> InvalidRequest:
    """Return, not raise, the error for a model that does not have the requested kind of answer.
    `found` continues "this model"; `wanted`: the kind of model that has it; `own`: the endpoints to
    use with this model; `code`: for programs."""
    remedy = f"use {own}, or serve such a model"
    return InvalidRequest(f"this model {found}", wanted=wanted, remedy=remedy, param="model", code=code)


def _shortened(vector: np.ndarray, size: int) -> np.ndarray:
    """Return the first `size` numbers of a vector of shape [N], `size` at most N, scaled to length
    1 if the whole vector has length 1 (Kusupati et al. 2022, Matryoshka). With `size` N the vector
    itself is returned."""
    if size == len(vector):
        return vector
    is_unit = abs(float(np.linalg.norm(vector)) - 1.0) < UNIT
    first = vector[:size]
    length = float(np.linalg.norm(first)) if is_unit else 1.0
    return first / (length or 1.0)


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / (lengths or 1.0)
