"""Numbers of experts, of latent attention and of rotary embeddings that a file leaves out, compared
with transformers' configuration classes for every architecture that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglcore.checkpoint.config_defaults import DEFAULTS
from sglcore.checkpoint.latent_config import latent_config, with_indexer
from sglcore.checkpoint.model_config import ModelConfig, config_of
from sglcore.checkpoint.rope_config import rotary_frequencies
from sglcore.models.architecture_registry import ARCHITECTURES

ALIKE = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
}
CAUSAL = sorted(name for name in ARCHITECTURES if name.endswith("ForCausalLM"))
SPARSE = ("num_experts", "num_local_experts", "n_routed_experts")


def read(architecture: str, **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    given = {"intermediate_size": 72, **SIZES, "architectures": [architecture], **changes}
    return config_of(Path("nowhere"), given, ARCHITECTURES)


def oracle(architecture: str, **changes: Any) -> Any:
    """The library's configuration of the same sizes."""
    return getattr(transformers, ALIKE.get(architecture, architecture)).config_class(**{**SIZES, **changes})


def sparse_layers(own: Any) -> list[bool]:
    """Which layers of the library's model have experts."""
    words = own.to_dict()
    if kinds := words.get("mlp_layer_types"):
        return [kind != "dense" for kind in kinds]
    first = words.get("first_k_dense_replace", words.get("num_dense_layers", 0))
    step, dense = words.get("decoder_sparse_step", 1), words.get("mlp_only_layers") or ()
    return [n >= first and n not in dense and (n + 1) % step == 0 for n in range(own.num_hidden_layers)]


WITH_EXPERTS = [name for name in CAUSAL if any(word in DEFAULTS.get(name, {}) for word in SPARSE)]


def test_every_architecture_with_experts_by_default_is_compared() -> None:
    own = {name for name in CAUSAL if any(oracle(name).to_dict().get(word) for word in SPARSE)}
    assert own == {*WITH_EXPERTS}


@pytest.mark.parametrize("given", [{}, {"moe_intermediate_size": 24}], ids=str)
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_experts_that_a_file_leaves_out_are_the_librarys(architecture: str, given: dict[str, int]) -> None:
    own = oracle(architecture, **given)
    words, moe = own.to_dict(), read(architecture, **given).moe
    assert moe is not None
    assert list(moe.layers) == sparse_layers(own)
    assert moe.scale == (words.get("routed_scaling_factor") or 1.0)
    groups = (words.get("n_group") or 1, words.get("topk_group") or 1)
    assert (moe.num_groups, moe.top_groups) == groups
    sizes = (words.get("shared_expert_intermediate_size"), words.get("moe_shared_expert_intermediate_size"))
    shared = (words.get("n_shared_experts") or 0) * moe.intermediate_size
    assert moe.shared_size == next((size for size in sizes if size is not None), shared)


LATENT = [name for name in CAUSAL if "kv_lora_rank" in oracle(name).to_dict()]
INDEXED = [name for name in LATENT if "index_topk" in oracle(name).to_dict()]


@pytest.mark.parametrize("architecture", LATENT)
def test_ranks_and_heads_of_latent_attention_are_the_librarys(architecture: str) -> None:
    own, found = oracle(architecture), latent_config(read(architecture), {})
    ranks = (found.q_rank, found.kv_rank, found.nope_dim, found.rope_dim, found.value_dim)
    words = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert ranks == tuple(getattr(own, word) for word in words)
    assert found.scaling == (own.qk_nope_head_dim + own.qk_rope_head_dim) ** -0.5


@pytest.mark.parametrize("architecture", INDEXED)
def test_indexers_are_the_librarys(architecture: str) -> None:
    own, config = oracle(architecture), read(architecture)
    found = with_indexer(config, latent_config(config, {}), is_paired=False)
    numbers = (found.top_k, found.index_heads, found.index_dim)
    assert numbers == (own.index_topk, own.index_n_heads, own.index_head_dim)
    assert list(found.indexers) == list(own.to_dict().get("indexer_types") or ["full"] * own.num_hidden_layers)


@pytest.mark.parametrize("architecture", CAUSAL)
def test_frequencies_of_a_file_that_says_nothing_of_them_are_the_librarys(architecture: str) -> None:
    own, config = oracle(architecture), read(architecture)
    rope = own.to_dict().get("rope_parameters")
    if rope is None or "main" in rope:  # no rotary embedding, or one for compressed blocks
        return
    kinds = [name for name in ("full_attention", None) if name is None or name in rope]
    parameters = rope[kinds[0]] if kinds[0] else rope
    found, scale = rotary_frequencies(config, 64)
    if parameters["rope_type"] == "default":
        size = 2 * len(found)
        assert scale == 1.0
        wanted = parameters["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        dim = own.to_dict().get("qk_rope_head_dim") or own.to_dict().get("head_dim") or 128
        assert size == int(dim * parameters.get("partial_rotary_factor", 1.0))
        torch.testing.assert_close(torch.from_numpy(found).double(), wanted, rtol=1e-6, atol=0)
        return
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](own, torch.device("cpu"), seq_len=64)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor)
