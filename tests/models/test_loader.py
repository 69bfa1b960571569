"""Loading weights: shards, ties, casts, progress, and every kind of faulty checkpoint."""

from __future__ import annotations

import json
import struct
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglcore.checkpoint.dtype import choose_dtype
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.models.checkpoint import load_checkpoint
from sglcore.models.weights.safetensors_file import read_into
from sglcore.models.weights.weight_packing import check_bounds
from sglcore.models.weights.weight_sources import some
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import llama, qwen3_moe, save
from tests.models.steps import load

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in one file."""
    return save(llama(), tmp_path)


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def test_shards_give_the_same_weights_as_one_file(tmp_path) -> None:
    oracle = qwen3_moe()
    whole = load(save(oracle, tmp_path / "one"))
    parts = load(save(oracle, tmp_path / "many", max_shard_size="20KB"))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for left, right in zip(whole.weights.parameters, parts.weights.parameters, strict=True):
        assert torch.equal(left, right)


def test_fused_weights_hold_their_parts_in_order(tmp_path) -> None:
    oracle = qwen3_moe()
    layer, model = oracle.model.layers[0], load(save(oracle, tmp_path))
    attention = layer.self_attn
    parts = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(model.layers[0].self_attn.qkv_proj.weight, parts)
    w13, w2 = model.layers[0].mlp.weights
    assert torch.equal(w13, layer.mlp.experts.gate_up_proj)
    assert torch.equal(w2, layer.mlp.experts.down_proj)


def test_weights_are_cast_and_need_no_gradient(folder) -> None:
    tensors = load_file(folder / FILE)
    model = load(folder, dtype=torch.bfloat16)
    assert torch.equal(model.layers[0].self_attn.o_proj.weight, tensors[Q.replace("q_proj", "o_proj")].bfloat16())
    assert all(weight.dtype == torch.bfloat16 and not weight.requires_grad for weight in model.weights.parameters)


class Drips(FileIO):
    """A file that gives three bytes at a time, as systems may: Linux stops at 2 GiB."""

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[:3])


def test_a_file_that_gives_fewer_bytes_than_asked_for_is_read_on(tmp_path) -> None:
    (tmp_path / FILE).write_bytes(bytes(range(10)))
    piece = torch.zeros(10, dtype=torch.uint8)
    with Drips(tmp_path / FILE) as file:
        assert read_into(file, piece) and piece.tolist() == [*range(10)]
        file.seek(1)
        assert not read_into(file, piece)


def test_a_tied_head_is_the_embedding_whether_the_file_has_it_or_not(tmp_path) -> None:
    folder = save(llama(tie_word_embeddings=True), tmp_path)
    model = load(folder)
    assert model.weights.head.weight is model.embed_tokens.weight
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 48)}))
    assert torch.equal(load(folder).weights.head.weight, model.weights.head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_progress_reaches_the_total(folder, dtype: torch.dtype) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, dtype=dtype, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in load_file(folder / FILE).values())


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "embeddings.position_ids", "h.0.attn.masked_bias"],
)
def test_harmless_leftovers_are_left(folder, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(6)}))
    load(folder)


def test_unaligned_data_is_read_too(folder) -> None:
    whole = load(folder)
    raw = (folder / FILE).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + size] + b" " * (3 - size % 8 % 3)
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
    assert len(header) % 4 != 0
    for left, right in zip(whole.weights.parameters, load(folder).weights.parameters, strict=True):
        assert torch.equal(left, right)


def drop(name: str):
    """A change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor):
    """A change that sets a tensor."""
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop(Q), rf"'{Q}' not in the checkpoint \(model.safetensors\)"),
        (put(Q, torch.zeros(48, 47)), rf"'{Q}' in model.safetensors has the shape \[48, 47\]; wanted \[48, 48\]"),
        (put(Q, torch.zeros(48, 48, dtype=torch.int8)), r"has the type I8; wanted one of F64, F32, F16, BF16"),
        (put("model.layers.0.extra.weight", torch.zeros(1)), r"has 'model.layers.0.extra.weight', which"),
        (put("model.layers.2.mlp.up_proj.weight", torch.zeros(1)), r"has 'model.layers.2.mlp.up_proj.weight', which"),
    ],
)
def test_tensors_that_differ_from_the_model_are_errors(folder, change, text: str) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=text) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_many_missing_tensors_are_counted_not_listed(folder) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('layers": 2', 'layers": 9'))
    with pytest.raises(CheckpointError, match=r"and \d+ more not in the checkpoint"):
        load(folder)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 12])
def test_every_name_is_listed_or_counted(count: int) -> None:
    text = some([f"tensor {each}" for each in range(count)])
    listed, _, more = text.partition(" and ")
    assert len(listed.split(", ")) + int(more.removesuffix(" more") or 0) == count
    assert more != "0 more" and listed.startswith("'tensor 0'")
    assert some(["a", "b"], 2) == "'a', 'b'" and some(["a", "b", "c"], 2) == "'a', 'b' and 1 more"


@pytest.mark.parametrize(
    ("numbers", "found"), [([0, 4], None), ([4, 0, 5], "from 0 to 5"), ([-1, 2], "from -1 to 2"), ([0], None)]
)
def test_ids_are_all_from_zero_to_below_their_bound(numbers: list[int], found: str | None) -> None:
    if found is None:
        check_bounds("d2t", torch.tensor(numbers), 5)
        return
    with pytest.raises(CheckpointError, match=f"d2t has numbers {found}; wanted 0 to 4"):
        check_bounds("d2t", torch.tensor(numbers), 5)


@pytest.mark.parametrize("size", [0, 5, 100, -1000])
def test_a_cut_file_is_an_error(folder, size: int) -> None:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:size])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged: it has .*; download it again"):
        load(folder)


@pytest.mark.parametrize(
    "header", [b"not json", b"[]", b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}']
)
def test_a_damaged_header_is_an_error(folder, header: bytes) -> None:
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(folder)


def test_missing_files_are_errors_that_name_them(tmp_path) -> None:
    folder = save(llama(), tmp_path, max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}; wanted the .* files of {INDEX}"):
        load(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged; wanted JSON with a weight_map"):
        load(folder)
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"neither .* \(other weight files: pytorch_model.bin\); download the saf"
    ):
        load(folder)


def test_an_index_that_misplaces_a_tensor_is_an_error(tmp_path) -> None:
    folder = save(llama(), tmp_path, max_shard_size="20KB")
    index = json.loads((folder / INDEX).read_text())
    keep = index["weight_map"]["model.norm.weight"]
    index["weight_map"] = {"model.norm.weight": keep}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"not in the checkpoint \\({keep}\\)"):
        load(folder)


def test_a_tensor_in_two_files_is_an_error(tmp_path) -> None:
    folder = save(llama(), tmp_path, max_shard_size="20KB")
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    save_file({**load_file(last), "model.embed_tokens.weight": torch.zeros(97, 48)}, last)
    with pytest.raises(CheckpointError, match=f"'model.embed_tokens.weight' is in both model-.* and {last.name}"):
        load(folder)


ALL, BRAIN, HALVES = Facts("cpu").dtypes, ("bfloat16",), ("float16", "bfloat16")


@pytest.mark.parametrize(
    ("asked", "stored", "dtypes", "preferred", "effective", "is_less"),
    [
        ("auto", "float16", ALL, "bfloat16", "bfloat16", False),
        ("auto", "float32", ALL, "bfloat16", "float32", False),
        ("auto", "bfloat16", ALL, None, "bfloat16", False),
        ("auto", "float64", ALL, None, "float32", False),
        ("float32", "bfloat16", ALL, "bfloat16", "float32", False),
        ("auto", "float32", BRAIN, None, "bfloat16", True),
        ("auto", "float64", BRAIN, None, "bfloat16", True),
        ("auto", "float32", HALVES, "bfloat16", "bfloat16", True),
        ("auto", "bfloat16", ("float32", "float16"), "float16", "float16", True),
        ("auto", "bfloat16", ("float32",), None, "float32", False),
        ("bfloat16", "float32", BRAIN, None, "bfloat16", False),
    ],
)
def test_the_dtype_is_the_checkpoints_own_unless_asked_or_not_computed_in(
    asked, stored, dtypes, preferred, effective, is_less
) -> None:
    row = choose_dtype(asked, stored, Facts("cpu", dtypes=dtypes, preferred_dtype=preferred))
    assert (row.effective, row.downgrade) == (effective, is_less)
    assert not is_less or f"the checkpoint's {stored} is converted" in row.reason


def test_a_dtype_that_is_not_computed_in_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'int7' cannot be used for computing; wanted one of float32"):
        choose_dtype("int7", "float32", Facts("cpu"))
    with pytest.raises(ConfigError, match="'int7' cannot be used for computing; .*; convert the checkpoint"):
        choose_dtype("auto", "int7", Facts("cpu"))
    with pytest.raises(
        ConfigError, match="'float16' cannot be used for computing; wanted one of bfloat16; leave --dtype out"
    ):
        choose_dtype("float16", "float32", Facts("cpu", dtypes=BRAIN))


def test_an_engines_configuration_loads_its_model_and_says_the_dtype(folder) -> None:
    ledger, phases = DecisionLedger(), set()
    model: Any = load_checkpoint(
        EngineConfig(model=str(folder), max_model_len=32),
        folder,
        facts=Facts(tensor_device="cpu"),
        kernels=KernelTable(),
        ledger=ledger,
        progress=lambda phase, done, total: phases.add(phase),
    )
    assert (model.dtype, model.rotary.shape[0]) == (torch.float32, 32)
    assert [(row.topic, row.effective) for row in ledger.rows] == [("model impl", "native"), ("dtype", "float32")]
    assert phases == {"loading weights"}
