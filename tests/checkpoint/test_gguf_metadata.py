"""What the metadata of a GGUF file means, and the bounds of its numbers. Headers are made in
memory, or written by the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from sglcore.checkpoint.gguf_config import LARGEST, checkpoint_name, end_tokens, gguf_config, token_id
from sglcore.checkpoint.gguf_header import OTHERS, TYPES, GgufHeader, GgufTensor, read_header
from sglcore.core.errors import CheckpointError

ROWS, COLUMNS = 97, 64
METADATA: Mapping[str, Any] = MappingProxyType(
    {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": COLUMNS,
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
)
SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"token_embd.weight": (ROWS, COLUMNS), "blk.0.attn_q.weight": (64, 64), "blk.1.attn_q.weight": (64, 64)}
)


def header(
    metadata: Mapping[str, Any] = METADATA, shapes: Mapping[str, tuple[int, ...]] = SHAPES, kind: str = "F32"
) -> GgufHeader:
    """Make a header in memory, of a model with two blocks."""
    tensors = {name: GgufTensor(name, kind, shape, 0, 4 * int(np.prod(shape))) for name, shape in shapes.items()}
    return GgufHeader(Path("m.gguf"), metadata, tensors, {})


def renamed(name: str) -> dict[str, Any]:
    """Return the metadata of the same sizes for another architecture."""
    found = {key.replace("llama.", f"{name}."): value for key, value in METADATA.items()}
    return {**found, "general.architecture": name}


@pytest.mark.parametrize("number", [*TYPES, *OTHERS])
def test_every_type_has_the_packages_number_and_sizes(number: int) -> None:
    kind = GGMLQuantizationType(number)
    name, *sizes = TYPES.get(number, (OTHERS.get(number), *gguf.GGML_QUANT_SIZES[kind]))
    assert (name, tuple(sizes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_what_the_metadata_leaves_out_has_the_values_of_llama_cpp() -> None:
    found = gguf_config(header())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": COLUMNS,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": COLUMNS // 4,
        "intermediate_size": 0,
        "vocab_size": ROWS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "dtype": "float32",
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("feed_forward_length", "intermediate_size"),
        ("context_length", "max_position_embeddings"),
    ],
)
def test_counts_are_from_one_to_the_largest(key: str, word: str) -> None:
    for count in (1, LARGEST):
        assert gguf_config(header({**METADATA, f"llama.{key}": count}))[word] == count
    for count in (-1, 0, LARGEST + 1):
        with pytest.raises(CheckpointError, match=rf"says llama.{key} = {count}; wanted 1 to {LARGEST}; download it"):
            gguf_config(header({**METADATA, f"llama.{key}": count}))


def test_a_head_has_at_least_one_element() -> None:
    assert gguf_config(header({**METADATA, "llama.attention.head_count": COLUMNS}))["head_dim"] == 1
    many = {**METADATA, "llama.attention.head_count": COLUMNS + 1}
    with pytest.raises(CheckpointError, match=r"m.gguf gives 64 elements to 65 heads; wanted at least one element"):
        gguf_config(header(many))
    assert gguf_config(header({**many, "llama.attention.key_length": 8}))["head_dim"] == 8


@pytest.mark.parametrize(
    "key",
    ["attention.head_count", "embedding_length", "block_count", "context_length", "attention.layer_norm_rms_epsilon"],
)
def test_a_number_that_no_model_is_without_is_named(key: str) -> None:
    given = {name: value for name, value in METADATA.items() if name != f"llama.{key}"}
    with pytest.raises(CheckpointError, match=rf"says llama.{key} = None; wanted a value of kind (int|float)"):
        gguf_config(header(given))


@pytest.mark.parametrize("value", [0, 0.25, 7, LARGEST])
def test_an_architectures_own_numbers_are_from_zero_on(value: float) -> None:
    key = "gemma2.final_logit_softcapping"
    assert gguf_config(header({**renamed("gemma2"), key: value}))["final_logit_softcapping"] == value


@pytest.mark.parametrize("value", [-1, -0.5, LARGEST + 1, True, "7", [7], float("nan")])
def test_an_architectures_own_numbers_that_are_none_are_named(value: Any) -> None:
    key = "gemma2.final_logit_softcapping"
    with pytest.raises(CheckpointError, match=rf"says {key} = .*; wanted 0 to {LARGEST}; download it"):
        gguf_config(header({**renamed("gemma2"), key: value}))


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ({**SHAPES, "token_embd.weight": (ROWS, COLUMNS + 1)}, r"2 blocks and embeddings of the shape \[97, 65\]"),
        ({**SHAPES, "token_embd.weight": (ROWS * COLUMNS,)}, r"2 blocks and embeddings of the shape \[6208\]"),
        ({**SHAPES, "token_embd.weight": (1, ROWS, COLUMNS)}, r"2 blocks and embeddings of the shape \[1, 97, 64\]"),
        ({**SHAPES, "blk.2.attn_q.weight": (64, 64)}, "3 blocks"),
        ({name: shape for name, shape in SHAPES.items() if "blk.1" not in name}, "1 blocks"),
    ],
)
def test_sizes_that_the_tensors_contradict_are_damage(shapes: Mapping[str, tuple[int, ...]], found: str) -> None:
    wanted = rf"has the tensors of {found}.*; wanted 2 blocks and embeddings of {COLUMNS} columns"
    with pytest.raises(CheckpointError, match=wanted):
        gguf_config(header(shapes=shapes))


def test_a_file_without_embeddings_is_no_whole_model() -> None:
    given = {name: shape for name, shape in SHAPES.items() if name != "token_embd.weight"}
    with pytest.raises(CheckpointError, match=r"has no 'token_embd.weight'; wanted a whole model"):
        gguf_config(header(shapes=given))


@pytest.mark.parametrize(
    ("tensor", "word", "is_so"),
    [
        ("output.weight", "tie_word_embeddings", False),
        ("blk.0.attn_q.bias", "attention_bias", True),
        ("blk.0.ffn_down.bias", "mlp_bias", True),
    ],
)
def test_tensors_decide_what_no_metadata_says(tensor: str, word: str, is_so: bool) -> None:
    assert gguf_config(header())[word] is not is_so
    assert gguf_config(header(shapes={**SHAPES, tensor: (64,)}))[word] is is_so


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.11.attn_output.weight", "model.layers.11.self_attn.o_proj.weight"),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("blk.3.ffn_gate_exps.weight", "model.layers.3.mlp.experts.{}.gate_proj.weight"),
        ("blk.0.attn_sinks.weight", None),
        ("blk.0.attn_q.scale", None),
        ("blk.x.attn_q.weight", None),
        ("rope_freqs.weight", None),
    ],
)
def test_tensors_have_the_checkpoints_names(name: str, wanted: str | None) -> None:
    assert checkpoint_name(header(renamed("qwen3moe")), name) == wanted


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
def test_a_token_that_ends_a_text_is_a_row_of_the_embeddings(name: str) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    assert end_tokens(header()) == ()
    for token in (0, COLUMNS, ROWS - 1):
        assert end_tokens(header({**METADATA, key: token})) == (token,)
    for token in (-1, ROWS, True, 1.0, "1"):
        with pytest.raises(CheckpointError, match=rf"says {key} = {token!r}; wanted 0 to {ROWS - 1}; download it"):
            end_tokens(header({**METADATA, key: token}))


def test_tokens_that_end_a_text_are_listed_once_in_the_metadatas_order() -> None:
    given = {f"tokenizer.ggml.{name}_token_id": token for name, token in (("eom", 5), ("eot", 9), ("eos", 7))}
    assert end_tokens(header({**METADATA, **given})) == (7, 9, 5)
    texts = {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|x|>"], "tokenizer.ggml.token_type": [3, 3, 3]}
    assert end_tokens(header({**METADATA, **texts, "tokenizer.ggml.eos_token_id": 2})) == (2, 1)
    assert end_tokens(header({**METADATA, **texts, "tokenizer.ggml.eos_token_id": 1})) == (1,)


def test_a_file_of_a_tokenizer_alone_bounds_tokens_by_the_largest_count() -> None:
    key = "tokenizer.ggml.bos_token_id"
    assert token_id(header({key: LARGEST - 1}), "bos") == LARGEST - 1
    with pytest.raises(CheckpointError, match=f"{key} = {LARGEST}; wanted 0 to {LARGEST - 1}"):
        token_id(header({key: LARGEST}), "bos")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"dimension_count": 8}, {"partial_rotary_factor": 0.5}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {}),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "yarn", "scaling.factor": 0.5}, {"rope_type": "yarn", "factor": 0.5}),
        ({"scaling.original_context_length": 128}, {"original_max_position_embeddings": 128}),
        ({"scaling.original_context_length": 0}, {}),
    ],
)
def test_positions_are_rotated_as_the_metadata_says(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    plain = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    found = gguf_config(header({**METADATA, **{f"llama.rope.{key}": value for key, value in given.items()}}))
    assert found["rope_parameters"] == {**plain, **wanted}


VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "a b\u00e9",
    }
)


def written(file: Path, **lists: Any) -> Path:
    """Write a file of metadata: a value of each kind, and lists."""
    writer = GGUFWriter(file, "llama")
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for name, values in lists.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_every_kind_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    lists = {"whole": [1, -2, 3], "halves": [0.5, -2.0], "truths": [True, False], "texts": ["a", "", "\u4f60"]}
    found = read_header(written(tmp_path / "m.gguf", **lists), texts=True).metadata
    assert {kind: found[f"x.{kind}"] for kind in VALUES} == dict(VALUES)
    assert {name: found[name] for name in lists} == lists


@pytest.mark.parametrize(("version", "is_read"), [(1, False), (2, True), (3, True), (4, False)])
def test_versions_two_and_three_are_read(version: int, is_read: bool, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    data = file.read_bytes()
    assert data[4:8] == struct.pack("<I", 3)
    file.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    if is_read:
        assert read_header(file).metadata["x.string"] == VALUES["string"]
        return
    with pytest.raises(CheckpointError, match=f"is GGUF version {version}; wanted 2 or 3; convert it again"):
        read_header(file)


def test_a_file_of_another_format_or_of_unknown_values_is_damage(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(b"GGML" + data[4:])
    with pytest.raises(CheckpointError, match="is damaged: it does not begin with GGUF"):
        read_header(file)
    for kind in (13, 255):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind)
        file.write_bytes(head + bytes(64))
        with pytest.raises(CheckpointError, match=f"it has a value of the unknown type {kind}"):
            read_header(file)


def test_rows_that_are_no_whole_blocks_are_damage(tmp_path: Path) -> None:
    name = b"a.weight"
    for columns, kind in ((31, "Q4_1"), (33, "Q4_1"), (128, "Q6_K")):
        number = GGMLQuantizationType[kind].value
        entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, columns, 2, number, 0)
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(999))
        block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        with pytest.raises(CheckpointError, match=f"rows of {columns} elements, and {kind} has blocks of {block}"):
            read_header(tmp_path / "m.gguf")


def test_a_file_that_says_it_is_its_only_part_is_whole(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint16("split.count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_header(tmp_path / "m.gguf").metadata["split.count"] == 1


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_data_begins_at_a_multiple_of_the_files_alignment(alignment: int, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    writer.add_tensor("factors", np.array([1.0, 2.5], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_header(tmp_path / "m.gguf").floats("factors") == (1.0, 2.5)


def test_only_plain_numbers_are_read_as_floats(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("before", np.zeros(3, np.float32))
    writer.add_tensor("factors", np.array([1.0, 2.5, -4.0], np.float32))
    writer.add_tensor("halves", np.ones(4, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(tmp_path / "m.gguf")
    assert found.floats("factors") == (1.0, 2.5, -4.0)
    with pytest.raises(CheckpointError, match=r"'halves' in .*m.gguf has the type F16; wanted F32"):
        found.floats("halves")


@pytest.mark.parametrize(
    ("kinds", "dtype"), [(("F16", "BF16"), "bfloat16"), (("F16",), "float16"), (("Q4_0",), "bfloat16")]
)
def test_vectors_do_not_decide_in_which_type_is_computed(kinds: tuple[str, ...], dtype: str) -> None:
    found = header()
    matrices = [name for name, shape in SHAPES.items() if len(shape) > 1]
    tensors = {
        name: GgufTensor(name, kinds[place % len(kinds)], SHAPES[name], 0, 0) for place, name in enumerate(matrices)
    }
    tensors["output_norm.weight"] = GgufTensor("output_norm.weight", "F32", (COLUMNS,), 0, 256)
    assert gguf_config(GgufHeader(found.path, METADATA, tensors, {}))["dtype"] == dtype
