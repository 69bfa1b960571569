"""Prompts as embeddings, with positions on three axes (M-RoPE): chunks, preemption, other requests
and the prefix cache change no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sglcore.sampling.params import SamplingParams
from sglcore.schedule import batch_builder
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.embeds_in_batch import add_embeds
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.result_checks import check_request
from tests.checkpoints import SIZES, gemma3, hybrid_sizes, make_oracle, qwen3_next, save
from tests.laws.engine import TOLERANCE, TokenEngine, random_prompts
from tests.schedule.fake_worker import make_limits

pytestmark = pytest.mark.needs("device")

NO_EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def qwen25_vl(**changes: Any) -> Any:
    """Heads of 12: sections of one, two and three frequencies."""
    text = {**SIZES, "rope_parameters": {**ROPE, "mrope_section": [1, 2, 3]}, **changes}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=NO_EYES, tie_word_embeddings=False)
    return make_oracle(config, "Qwen2_5_VLForConditionalGeneration")


def qwen3_vl(**changes: Any) -> Any:
    """Heads of 20 with interleaved sections of the three axes."""
    text = {
        **SIZES,
        "head_dim": 20,
        "rope_parameters": {**ROPE, "mrope_section": [4, 3, 3], "mrope_interleaved": True},
        **changes,
    }
    eyes = {**NO_EYES, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=False)
    return make_oracle(config, "Qwen3VLForConditionalGeneration")


def qwen35_vl() -> Any:
    """Heads of 24 with half of each rotated, and recurrent layers before and after the attention
    layer."""
    turned = {**ROPE, "mrope_section": [3, 2, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    text = {**hybrid_sizes(), "rope_parameters": turned}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=NO_EYES, tie_word_embeddings=False)
    return make_oracle(config, "Qwen3_5ForConditionalGeneration")


MODELS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"qwen2.5-vl": qwen25_vl, "qwen3-vl": qwen3_vl, "qwen3.5": qwen35_vl}
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = MODELS[request.param]()
    yield save(oracle, tmp_path_factory.mktemp("vl")), oracle


def image_prompt(seed: int, before: int = 3, rows: int = 3, columns: int = 4, after: int = 5) -> PromptEmbeds:
    """Make a prompt of text, an image with grid positions, and text, numbered as the models do."""
    grid = np.stack(np.meshgrid(np.arange(1), np.arange(rows), np.arange(columns), indexing="ij")).reshape(3, -1)
    end = before + max(rows, columns)
    parts = [np.tile(np.arange(before), (3, 1)), grid + before, np.tile(np.arange(after) + end, (3, 1))]
    positions = np.concatenate(parts, axis=1)
    source = np.random.default_rng(seed)
    return PromptEmbeds(source.normal(size=(positions.shape[1], 48)).astype(np.float32), None, positions)


def greedy(oracle: Any, prompt: PromptEmbeds | list[int], tokens: list[int]) -> np.ndarray:
    """Return float32 [tokens]: transformers' log-probability of each token after the prompt and the
    tokens before it."""
    table = oracle.get_input_embeddings()
    with torch.no_grad():
        if isinstance(prompt, PromptEmbeds):
            start, axes = torch.from_numpy(prompt.rows)[None], prompt.axes
            more = np.tile(np.arange(len(tokens)) + axes.max() + 1, (3, 1))
            positions = torch.from_numpy(np.concatenate([axes, more], axis=1))[:, None].long()
        else:
            start = table(torch.tensor([prompt]))
            positions = torch.arange(len(prompt) + len(tokens)).expand(3, 1, -1)
        embeds = torch.cat((start, table(torch.tensor([tokens]))), dim=1)
        decoder = getattr(oracle.model, "language_model", None)
        if decoder is None:
            hidden = oracle.model(inputs_embeds=embeds, position_ids=positions[0]).last_hidden_state
        else:
            hidden = decoder(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        found = oracle.lm_head(hidden)[0].log_softmax(-1)
    first = start.shape[1] - 1
    return np.array([float(found[first + place, token]) for place, token in enumerate(tokens)])


def serve(made: TokenEngine, prompts: list[PromptEmbeds | list[int]], max_tokens: int = 6) -> list[Request]:
    """Run all prompts together, greedily, with log-probabilities."""
    params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=max_tokens)
    requests: list[Request] = []
    for prompt in prompts:
        embeds = prompt if isinstance(prompt, PromptEmbeds) else None
        ids = np.array(prompt.ids if isinstance(prompt, PromptEmbeds) else prompt, np.int32)
        requests.append(made.request(ids, params))
        requests[-1].embeds = embeds
    made.submit(requests)
    made.finish()
    return requests


def check(oracle: Any, prompts: list[PromptEmbeds | list[int]], requests: list[Request]) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.finish_reason == "length", request.error
        found = [float(each.chosen[0]) for each in request.logprobs]
        np.testing.assert_allclose(found, greedy(oracle, prompt, request.output_ids), atol=TOLERANCE, rtol=0)


def mixed() -> list[PromptEmbeds | list[int]]:
    return [image_prompt(1), random_prompts(3, (9,))[0], image_prompt(2, before=0, rows=5, columns=2), image_prompt(1)]


@pytest.mark.parametrize("chunk", [7, 128])
def test_images_among_texts_are_those_of_transformers(model: tuple[Path, Any], chunk: int) -> None:
    folder, oracle = model
    made, prompts = TokenEngine(folder, max_batch_tokens=chunk), mixed()
    check(oracle, prompts, serve(made, prompts))
    made.worker.close()


def test_retracted_prompts_begin_again_by_their_embeddings(model: tuple[Path, Any]) -> None:
    folder, oracle = model
    made, prompts = TokenEngine(folder, max_batch_tokens=16, kv_cache_memory=60000), [*mixed(), image_prompt(5)]
    check(oracle, prompts, serve(made, prompts, 24))
    assert made.scheduler.stats().retractions
    made.worker.close()


def test_prompts_of_one_length_share_no_pages(model: tuple[Path, Any]) -> None:
    folder, oracle = model
    made = TokenEngine(folder)
    one_after_another(made, oracle)
    assert made.scheduler.stats().hit_tokens == 0
    made.worker.close()


def one_after_another(made: TokenEngine, oracle: Any) -> None:
    """Two images with a text between them that has the image's placeholder ids."""
    prompts: list[PromptEmbeds | list[int]] = [image_prompt(1), image_prompt(2), [0] * 20, image_prompt(1)]
    for prompt in prompts:
        check(oracle, [prompt], serve(made, [prompt]))


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_embeddings_without_positions_are_served_by_any_decoder(tmp_path: Path, impl: str) -> None:
    oracle = gemma3()
    made = TokenEngine(save(oracle, tmp_path), model_impl=impl, max_batch_tokens=9)
    source = np.random.default_rng(3)
    prompts: list[PromptEmbeds | list[int]] = [PromptEmbeds(source.normal(size=(14, 48))), random_prompts(3, (9,))[0]]
    check(oracle, prompts, serve(made, prompts))
    made.worker.close()


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_embeddings_of_a_model_with_states_begin_with_zeros(tmp_path: Path, impl: str) -> None:
    oracle = qwen3_next()
    settings = {"max_batch_tokens": 9, "max_requests": 2, "kv_cache_memory": 26112, "max_model_len": 64}
    made = TokenEngine(save(oracle, tmp_path), model_impl=impl, poison=True, **settings)
    source = np.random.default_rng(4)
    sources = [PromptEmbeds(source.normal(size=(size, 48)) * 0.1) for size in (14, 17, 3)]
    prompts: list[PromptEmbeds | list[int]] = [*sources, random_prompts(3, (9,))[0], sources[0]]
    check(oracle, prompts, serve(made, prompts, 24))
    assert made.scheduler.stats().retractions
    made.worker.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PromptEmbeds(np.zeros(5)), "shape"),
        (lambda: PromptEmbeds(np.zeros((5, 48)), [1, 2]), "token_ids"),
        (lambda: PromptEmbeds(np.zeros((5, 48)), None, np.zeros((2, 5))), "positions"),
        (lambda: PromptEmbeds("text"), "numbers"),
        (lambda: PromptEmbeds(np.zeros((5, 47))), "48 numbers"),
        (lambda: PromptEmbeds(np.zeros((5, 48)), None, np.full((3, 5), 9)), "positions"),
    ],
)
def test_what_is_no_prompt_is_refused(model: tuple[Path, Any], make: Callable[[], PromptEmbeds], said: str) -> None:
    made = TokenEngine(model[0])
    with pytest.raises(RequestError, match=said):
        serve(made, [make()])
    made.worker.close()


@pytest.mark.parametrize(
    ("embeds", "given", "limits", "said"),
    [
        (PromptEmbeds(np.zeros((3, 4)), None, [[0, -1, 0]] * 3), {}, {}, r"-1\.\.0, wanted 0\.\.2"),
        (
            PromptEmbeds(np.zeros((3, 4)), None, [[0, 1, 2]] * 3),
            {},
            {"takes_mrope": False, "draft_tokens": 2},
            "verified with one axis; start with --speculative off",
        ),
        (PromptEmbeds(np.zeros((3, 4)), None, [[0, 1, 2]] * 3), {}, {"takes_mrope": False}, "this model has one"),
        (PromptEmbeds(np.zeros((3, 4))), {}, {"embed_size": 0}, "give text or token ids"),
        (PromptEmbeds(np.zeros((3, 4))), {"prompt_logprobs": 1}, {}, "prompt_logprobs; give the token_ids"),
        (PromptEmbeds(np.zeros((3, 4))), {"presence_penalty": 1.0}, {}, "penalties .*; give the token_ids"),
        (PromptEmbeds(np.zeros((3, 4))), {}, {"reads_history": True}, "earlier token ids; give the token_ids"),
        (PromptEmbeds(np.zeros((3, 4)), [1, 2, 50]), {}, {}, "token id 50"),
    ],
)
def test_what_a_worker_can_not_take_is_refused(
    embeds: PromptEmbeds, given: dict[str, Any], limits: dict[str, Any], said: str
) -> None:
    request = Request("r", np.array(embeds.ids, np.int32), SamplingParams(**given), embeds=embeds)
    with pytest.raises(RequestError, match=said):
        check_request(request, make_limits(**{"embed_size": 4, "takes_mrope": True, **limits}))


def test_tokens_go_on_behind_the_largest_position_wherever_it_is() -> None:
    assert PromptEmbeds(np.zeros((3, 4)), None, [[0, 0, 0], [0, 1, 0], [0, 0, 0]]).delta == -1


# -- planted defects
# --------------------------------------------------------------------------------------------------


def no_delta(batch: Any, requests: Any) -> None:
    """Mutant: tokens after the prompt have their index as position."""
    add_embeds(batch, requests)
    if batch.embed_rows is None:
        batch.mrope_positions = None


def first_chunk_again(batch: Any, requests: Any) -> None:
    """Mutant: later chunks repeat embeddings of the first."""
    add_embeds(batch, requests)
    if batch.embed_rows is not None and batch.prefix_lens.any():
        batch.prompt_embeds = np.roll(batch.prompt_embeds, 1, axis=0)


def one_axis(batch: Any, requests: Any) -> None:
    add_embeds(batch, requests)
    if batch.mrope_positions is not None:
        batch.mrope_positions[:] = batch.mrope_positions[0]


@pytest.mark.parametrize("defect", [no_delta, first_chunk_again, one_axis])
def test_a_planted_defect_is_caught(
    model: tuple[Path, Any], defect: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    made, prompts = TokenEngine(folder, max_batch_tokens=7), mixed()
    monkeypatch.setattr(batch_builder, "add_embeds", defect)
    with pytest.raises(AssertionError, match="Not equal"):
        check(oracle, prompts, serve(made, prompts))
    made.worker.close()


def publishes_all(memory: Memory, request: Request, cells: int) -> None:
    """Mutant: text prompts hit pages of embeddings."""
    memory._publish(request, cells, leaving=False)


def matches_all(memory: Memory, request: Request, *promised: int) -> bool:
    """Mutant: embeddings hit pages of text prompts."""
    request.embeds, embeds = None, request.embeds
    try:
        return ADMIT(memory, request, *promised)
    finally:
        request.embeds = embeds


ADMIT = Memory.admit


# No model with recurrent states: there a prefix hit needs a snapshot too.
@pytest.mark.parametrize("model", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
@pytest.mark.parametrize(("name", "defect"), [("publish", publishes_all), ("admit", matches_all)])
def test_pages_that_others_could_share_would_be_noticed(
    model: tuple[Path, Any], name: str, defect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    made = TokenEngine(folder)
    monkeypatch.setattr(Memory, name, defect)
    with pytest.raises(AssertionError, match="Not equal"):
        one_after_another(made, oracle)
    made.worker.close()


def test_who_verifies_proposals_takes_no_positions_by_three_axes(tmp_path: Path) -> None:
    folder = save(qwen25_vl(), tmp_path)
    for kind in ("off", "ngram"):
        engine = TokenEngine(folder, speculative=kind, graph="off")
        assert engine.worker.limits.takes_mrope == (kind == "off")
        engine.worker.close()
