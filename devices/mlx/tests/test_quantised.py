"""Tests quantised checkpoints against the same weights dequantised, without torch; and formats that
are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.model_cases import hidden_states, load, logprobs, split_parts
from sglcore.core.errors import CheckpointError, ConfigError, SglcoreError

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS, WIDE = 64, 96, 4, 2, 16, 101, 4, 32
IDS = (
    1,
    5,
    17,
    3,
    60,
    41,
    8,
    100,
    22,
    77,
    9,
    2,
    64,
    31,
    15,
    6,
    90,
    12,
    28,
    83,
    4,
    19,
    55,
    71,
    38,
    47,
    10,
    66,
    7,
    99,
    13,
    80,
)
FEW = 7
"""So few tokens that they are not sorted by expert; all of `IDS` are sorted."""

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "mlp_only_layers": [0],
    "attention_bias": True,
    "torch_dtype": "float32",
}
"""A dense layer and a mixture-of-experts layer, with biases: every kind of quantisable product."""

Tensors = dict[str, mx.array]
Module = tuple[int, ...]


def modules() -> dict[str, Module]:
    """Return the modules that can be quantised, and the shapes of their weights."""
    found: dict[str, Module] = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn."
        found |= {f"{attention}{name}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
        found |= {f"{attention}q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{attention}o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    dense, sparse = "model.layers.0.mlp.", "model.layers.1.mlp."
    found |= {f"{dense}{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    found |= {f"{sparse}switch_mlp.{name}_proj": (EXPERTS, WIDE, HIDDEN) for name in ("gate", "up")}
    found |= {f"{dense}down_proj": (HIDDEN, INNER), f"{sparse}switch_mlp.down_proj": (EXPERTS, HIDDEN, WIDE)}
    return {**found, f"{sparse}gate": (EXPERTS, HIDDEN)}


def drawn(shape: Module, seed: int) -> mx.array:
    """Return a seeded random array."""
    return mx.array(np.random.default_rng(seed).normal(0, 0.2, shape).astype(np.float32))


def others() -> Tensors:
    """Return the tensors that are never quantised: norms and biases."""
    found = {"model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        found |= {f"{at}self_attn.{name}_proj.bias": (KV_HEADS * HEAD_DIM,) for name in "kv"}
        found |= {f"{at}self_attn.q_proj.bias": (HEADS * HEAD_DIM,), f"{at}self_attn.o_proj.bias": (HIDDEN,)}
    return {name: 1 + drawn(shape, seed) for seed, (name, shape) in enumerate(found.items(), 900)}


@dataclass(frozen=True, slots=True)
class Case:
    """A quantisation: the format of all modules, and overrides by name (None: not quantised)."""

    form: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Any] | None]

    def of(self, name: str) -> Mapping[str, Any] | None:
        """Return the format of a module."""
        return self.modules.get(name, self.form)

    @property
    def config(self) -> dict[str, Any]:
        """The quantisation as in `config.json`."""
        return {**self.form, **{name: form or False for name, form in self.modules.items()}}


FOUR = {"group_size": 32, "bits": 4}
EIGHT = {"group_size": 32, "bits": 8}
CASES = {
    "4-bit": Case(FOUR, {}),
    "3-bit": Case({"group_size": 32, "bits": 3}, {}),
    "6-bit-groups-of-64": Case(
        {"group_size": 64, "bits": 6},
        {name: EIGHT for name in modules() if "down_proj" in name or "model.layers.1.mlp" in name},
    ),
    "mxfp4": Case({"group_size": 32, "bits": 4, "mode": "mxfp4"}, {}),
    "mxfp8": Case({"group_size": 32, "bits": 8, "mode": "mxfp8"}, {}),
    "nvfp4": Case({"group_size": 16, "bits": 4, "mode": "nvfp4"}, {}),
    "mixed": Case(
        FOUR,
        {
            "lm_head": EIGHT,
            "model.embed_tokens": None,
            "model.layers.0.self_attn.v_proj": EIGHT,
            "model.layers.1.self_attn.q_proj": None,
            "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
            "model.layers.1.mlp.switch_mlp.up_proj": EIGHT,
            "model.layers.1.mlp.switch_mlp.down_proj": None,
            "model.layers.1.mlp.gate": EIGHT,
        },
    ),
}


def write(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    """Write a checkpoint of one file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def both(case: Case) -> tuple[Tensors, Tensors]:
    """Return the tensors of the quantised checkpoint, and of a plain one with the dequantised
    weights."""
    packed, plain = others(), others()
    for seed, (name, shape) in enumerate(modules().items()):
        weight, form = drawn(shape, seed), case.of(name)
        if form is None:
            packed[f"{name}.weight"] = plain[f"{name}.weight"] = weight
            continue
        parts = mx.quantize(weight, **form)
        packed |= dict(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=False))
        plain[f"{name}.weight"] = mx.dequantize(*parts, **form).astype(mx.float32)
    return packed, plain


@pytest.mark.parametrize("name", CASES)
def test_packed_weights_give_the_numbers_of_unpacked_ones(tmp_path: Path, name: str) -> None:
    packed, plain = both(CASES[name])
    quantised = load(write(tmp_path / "packed", packed, quantization=CASES[name].config), parts=split_parts())
    whole = load(write(tmp_path / "plain", plain))
    for count in (1, FEW, len(IDS)):
        np.testing.assert_allclose(logprobs(quantised, IDS[:count]), logprobs(whole, IDS[:count]), rtol=0, atol=1e-4)
    assert quantised.num_bytes == sum(array.nbytes for array in kept(packed)) < whole.num_bytes / 2


def kept(tensors: Tensors) -> list[mx.array]:
    """Return the tensors as a model keeps them: head norms are repeated for each head."""
    repeated = {"q_norm": HEADS, "k_norm": KV_HEADS}
    counts = {name: next((repeated[part] for part in repeated if part in name), 1) for name in tensors}
    return [array for name, array in tensors.items() for _ in range(counts[name])]


def test_a_tied_head_is_the_packed_embedding(tmp_path: Path) -> None:
    packed, plain = both(CASES["4-bit"])
    for tensors in (packed, plain):
        for name in [name for name in tensors if name.startswith("lm_head")]:
            del tensors[name]
    tied = {"tie_word_embeddings": True}
    quantised = load(write(tmp_path / "packed", packed, **tied, quantization=FOUR))
    whole = load(write(tmp_path / "plain", plain, **tied))
    np.testing.assert_allclose(logprobs(quantised, IDS), logprobs(whole, IDS), rtol=0, atol=1e-4)


def test_the_forms_are_named_for_people(tmp_path: Path) -> None:
    def named(name: str) -> str:
        tensors, _ = both(CASES[name])
        return load(write(tmp_path / name, tensors, quantization=CASES[name].config)).quantization

    assert named("4-bit") == "4-bit, groups of 32"
    assert named("nvfp4") == "nvfp4, groups of 16"
    assert named("6-bit-groups-of-64") == "6-bit, groups of 64; 8-bit, groups of 32"


def test_weights_in_sixteen_bits_are_computed_with_packed_ones(tmp_path: Path) -> None:
    packed, plain = both(CASES["4-bit"])
    quantised = load(write(tmp_path / "packed", packed, quantization=FOUR), mx.bfloat16)
    whole = load(write(tmp_path / "plain", plain), mx.bfloat16, split_parts())
    forward = mx.compile(lambda ids: hidden_states(quantised, ids, lambda layer, q, k, v: q))
    assert forward(mx.array(IDS)).dtype == mx.bfloat16
    np.testing.assert_allclose(np.exp(logprobs(quantised, IDS)), np.exp(logprobs(whole, IDS)), atol=0.1)


def drop(name: str) -> Callable[[Tensors], object]:
    """Return a change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: mx.array) -> Callable[[Tensors], object]:
    """Return a change that sets a tensor."""
    return lambda tensors: tensors.update({name: tensor})


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop(f"{Q}.biases"), f"'{Q}.biases' not in the checkpoint"),
        (drop(f"{Q}.scales"), f"'{Q}.weight' in model.safetensors has the type U32; wanted one of F32, F16, BF16"),
        (put(f"{Q}.weight", mx.zeros((64, 16), dtype=mx.uint32)), r"has the shape \[64, 16\]; wanted \[64, 8\]"),
        (put(f"{Q}.scales", mx.zeros((64, 2), dtype=mx.uint8)), "has the type U8; wanted one of F32"),
        (put(f"{Q}.scales", mx.zeros((64, 1))), r"q_proj.scales' in .* has the shape \[64, 1\]; wanted \[64, 2\]"),
        (put("lm_head.global_scale", mx.zeros(1)), "has 'lm_head.global_scale', which this architecture does not use"),
    ],
)
def test_packed_tensors_that_differ_from_the_configuration_are_errors(
    tmp_path: Path, change: Callable[[Tensors], object], text: str
) -> None:
    tensors, _ = both(CASES["4-bit"])
    change(tensors)
    with pytest.raises(CheckpointError, match=text) as error:
        load(write(tmp_path / "model", tensors, quantization=FOUR))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised by 'gptq'; wanted plain weights; use",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised by 'unnamed'"),
        ({"quantization": "4bit"}, "gives quantization as '4bit'; wanted group_size and bits"),
        ({"quantization": {**FOUR, "mode": "spiral"}}, "the mode 'spiral' with 4 bits and groups of 32; wanted affine"),
        ({"quantization": {**FOUR, "bits": 7}}, "the mode 'affine' with 7 bits and groups of 32"),
        ({"quantization": {"bits": 4}}, "the mode 'affine' with 4 bits and groups of None"),
        ({"quantization": {**FOUR, Q: {**FOUR, "mode": "mxfp8"}}}, f"quantization of '{Q}' the mode 'mxfp8' with 4 b"),
        ({"quantization": {**FOUR, Q: {**FOUR, "global_scale": True}}}, f"quantization of '{Q}' global_scale; wanted"),
        ({"quantization": {**FOUR, "rotated": "yes"}}, "gives the quantization rotated; wanted none of these"),
        ({"quantization": FOUR, "quantize_activations": True}, "is for quantised activations"),
    ],
)
def test_forms_that_can_not_be_run_are_errors(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    tensors, _ = both(CASES["4-bit"])
    with pytest.raises(ConfigError, match=text) as error:
        load(write(tmp_path / "model", tensors, **changes))
    assert "mlx_lm.convert" in str(error.value)


def test_a_module_that_is_said_to_be_plain_must_be_plain(tmp_path: Path) -> None:
    tensors, _ = both(CASES["4-bit"])
    with pytest.raises(SglcoreError, match=f"'{Q}.weight' in model.safetensors has the type U32"):
        load(write(tmp_path / "model", tensors, quantization={**FOUR, Q: False}))
