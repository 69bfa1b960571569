"""Tests of reading checkpoints without torch: shards, tied weights, casts, progress, and errors of
checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.model_cases import hidden_states, load, logprobs, split_parts
from sglcore.checkpoint.safetensors_header import ELEMENT_BYTES
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore_mlx import package
from sglcore_mlx.bring_up import kernels
from sglcore_mlx.load import MAPPED
from sglcore_mlx.models.contract import LayerShape

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
DEMO = Path(__file__).parents[3] / "sglcore" / "assets" / "demo"
IDS = (1, 5, 17, 3, 60, 41, 8)

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 48, 160, 4, 2, 12, 97, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

Tensors = dict[str, mx.array]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of the small Llama."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}self_attn.{name}_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
        found |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        found |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {**found, "model.norm.weight": (HIDDEN,)}


def random_tensors() -> Tensors:
    """Return seeded random weights."""
    random = np.random.default_rng(3)
    return {name: mx.array(random.normal(0, 0.2, shape).astype(np.float32)) for name, shape in shapes().items()}


def write(folder: Path, tensors: Tensors, **changes: object) -> Path:
    """Write a checkpoint of one file; `changes` are applied to its configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    mx.save_safetensors(str(folder / FILE), tensors)
    return folder


def write_shards(folder: Path, tensors: Tensors, count: int = 3) -> Path:
    """Write a checkpoint of several files with an index."""
    write(folder, tensors)
    (folder / FILE).unlink()
    names, places = sorted(tensors), {}
    for shard in range(count):
        file, part = f"model-{shard + 1:05}-of-{count:05}.safetensors", names[shard::count]
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in part})
        places |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in one file."""
    return write(tmp_path / "model", random_tensors())


def test_the_embedded_model_gives_probabilities() -> None:
    model = load(DEMO, mx.bfloat16)
    found = logprobs(model, (1, 900, 33, 2000, 4))
    assert found.shape == (5, 2147)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1, atol=1e-4)
    assert model.layers == (LayerShape(8, 4, 32, None, 32**-0.5),) * 6
    assert (model.dtype, model.quantization) == (mx.bfloat16, "none")
    assert model.num_bytes == bytes_before(DEMO / FILE, "model.layers.6.")


def bytes_before(file: Path, head: str) -> int:
    """Return the bytes of a file's tensors without the extra layer that predicts draft tokens."""
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    places = [each["data_offsets"] for name, each in header.items() if name != "__metadata__" and head not in name]
    return sum(end - start for start, end in places)


def test_wide_and_narrow_weights_mean_the_same_up_to_rounding() -> None:
    narrow, wide = (logprobs(load(DEMO, dtype), (1, 900, 33, 2000, 4)) for dtype in (mx.bfloat16, mx.float32))
    np.testing.assert_allclose(np.exp(narrow), np.exp(wide), atol=0.03)


def test_two_streams_give_the_embedded_models_numbers() -> None:
    ids = (1, 900, 33, 2000, 4)
    np.testing.assert_allclose(logprobs(load(DEMO, parts=split_parts()), ids), logprobs(load(DEMO), ids), atol=1e-4)


def test_shards_give_the_same_numbers_as_one_file(folder: Path, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", random_tensors())
    assert np.array_equal(logprobs(load(shards), IDS), logprobs(load(folder), IDS))


def test_weights_are_cast_to_the_dtype(folder: Path) -> None:
    model = load(folder, mx.float16)
    assert model.num_bytes == 2 * sum(int(np.prod(shape)) for shape in shapes().values())
    assert hidden_states(model, mx.array([3]), lambda layer, q, k, v: q).dtype == mx.float16


def test_a_tied_head_is_the_embedding_whether_the_file_has_it_or_not(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    whole = load(write(tmp_path / "whole", tensors))
    left = load(write(tmp_path / "left", tensors, tie_word_embeddings=True))
    del tensors["lm_head.weight"]
    tied = load(write(tmp_path / "tied", tensors, tie_word_embeddings=True))
    assert np.array_equal(logprobs(tied, IDS), logprobs(whole, IDS))
    assert np.array_equal(logprobs(left, IDS), logprobs(whole, IDS))
    assert tied.num_bytes == left.num_bytes == whole.num_bytes - 4 * VOCAB * HIDDEN


def test_progress_grows_to_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load(folder, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (model.num_bytes, model.num_bytes)


def test_a_model_is_in_memory_once_while_it_is_read(folder: Path) -> None:
    mx.clear_cache()
    mx.reset_peak_memory()
    before, largest = mx.get_active_memory(), 4 * 2 * INNER * HIDDEN
    model = load(folder)
    after = mx.get_active_memory() - before
    assert model.num_bytes <= after <= model.num_bytes * 1.1
    assert mx.get_peak_memory() - before <= model.num_bytes + 2 * largest


def test_unaligned_data_is_read_too(folder: Path) -> None:
    whole = logprobs(load(folder), IDS)
    raw = (folder / FILE).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + size] + b" " * (3 - size % 8 % 3)
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
    assert len(header) % 4 != 0
    assert np.array_equal(logprobs(load(folder), IDS), whole)


def test_harmless_leftovers_are_left(tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(6)}
    load(write(tmp_path / "model", {**random_tensors(), **old}))


def drop(name: str) -> Callable[[Tensors], object]:
    """Return a change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: mx.array) -> Callable[[Tensors], object]:
    """Return a change that sets a tensor."""
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop(Q), rf"'{Q}' not in the checkpoint; check config.json"),
        (put(Q, mx.zeros((48, 47))), rf"'{Q}' in model.safetensors has the shape \[48, 47\]; wanted \[48, 48\]"),
        (put(Q, mx.zeros((48, 48), dtype=mx.int8)), r"has the type I8; wanted one of F32, F16, BF16"),
        (put("model.layers.0.extra.weight", mx.zeros(1)), r"has 'model.layers.0.extra.weight', which"),
        (put("model.layers.2.mlp.up_proj.weight", mx.zeros(1)), r"has 'model.layers.2.mlp.up_proj.weight', which"),
        (put("model.layers.0.self_attn.q_proj.bias", mx.zeros(48)), r"has 'model.layers.0.self_attn.q_proj.bias', w"),
    ],
)
def test_tensors_that_differ_from_the_model_are_errors(
    tmp_path: Path, change: Callable[[Tensors], object], text: str
) -> None:
    tensors = random_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=text) as error:
        load(write(tmp_path / "model", tensors))
    assert "\n" not in str(error.value)


def test_many_missing_tensors_are_counted_not_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"and \d+ more not in the checkpoint"):
        load(write(tmp_path / "model", random_tensors(), num_hidden_layers=9))


@pytest.mark.parametrize("size", [0, 5, 100, -1000])
def test_a_cut_file_is_an_error(folder: Path, size: int) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:size])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged: it has .*; download it again"):
        load(folder)


@pytest.mark.parametrize(
    "header", [b"not json", b"[]", b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}']
)
def test_a_damaged_header_is_an_error(folder: Path, header: bytes) -> None:
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(folder)


def test_the_bytes_of_every_type_that_is_mapped_are_checked() -> None:
    assert set(MAPPED) <= ELEMENT_BYTES.keys()


@pytest.mark.parametrize(("kind", "width"), [("F8_E4M3", 1), ("F64", 8)])
def test_elements_that_can_not_be_mapped_are_an_error(folder: Path, kind: str, width: int) -> None:
    header = json.dumps({Q: {"dtype": kind, "shape": [4], "data_offsets": [0, 4 * width]}}).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 * width)
    with pytest.raises(CheckpointError, match=f"'{Q}' in model.safetensors has the type {kind}; wanted one of F32"):
        load(folder)


def test_missing_files_are_errors_that_name_them(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", random_tensors())
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}; wanted the 3 files of {INDEX}"):
        load(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged; wanted JSON with a weight_map"):
        load(folder)
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"\(other weight files: pytorch_model.bin\); download the safetensors"):
        load(folder)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", random_tensors())
    first, last = (sorted(folder.glob("model-*.safetensors"))[i] for i in (0, -1))
    last.write_bytes(first.read_bytes())
    with pytest.raises(
        CheckpointError, match=f"is in both {first.name} and {last.name}; wanted each tensor in one file"
    ):
        load(folder)


def test_an_architecture_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", random_tensors(), architectures=["GhostForCausalLM"])
    with pytest.raises(ConfigError, match="'GhostForCausalLM' is not supported; wanted one that docs/models.md lists"):
        load(folder)


def test_a_sparse_model_needs_its_experts_sizes(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", random_tensors(), architectures=["Qwen3MoeForCausalLM"], num_local_experts=0)
    with pytest.raises(ConfigError, match="lacks the number of experts or their intermediate size; wanted both"):
        load(folder)


@pytest.mark.parametrize("asked", ["reference", "triton"])
def test_kernels_that_this_device_does_not_have_are_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels is '{asked}'; wanted one of auto, mlx"):
        kernels(EngineConfig(kernels=asked), package, DecisionLedger())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"hisparse": "on"}, "hisparse is requested, but host and accelerator share one memory"),
        ({"hisparse": '{"top_k": 0}'}, "top_k of hisparse is 0"),
        (
            {"quantize": "int8"},
            "quantize is 'int8', but this device keeps weights and KV entries as the checkpoint has them",
        ),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', but this device keeps weights and KV entries"),
    ],
)
def test_what_this_device_does_not_do_is_refused_by_name_before_a_model_is_read(
    asked: dict[str, Any], reason: str
) -> None:
    """The step that refuses runs before a model is known; the value "off" is accepted."""
    kernels(EngineConfig(hisparse="off", speculative="off"), package, DecisionLedger())
    with pytest.raises(ConfigError, match=reason):
        kernels(EngineConfig(**asked), package, DecisionLedger())
