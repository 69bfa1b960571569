"""How the header of a GGUF file is read: texts, lists, damage, and the model that it describes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from sglcore.checkpoint.gguf_config import end_tokens, gguf_config
from sglcore.checkpoint.gguf_header import GgufHeader, GgufTensor, is_gguf, read_header
from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import CheckpointError, ConfigError
from tests.checkpoint.test_gguf_metadata import METADATA, SHAPES, header, renamed


def text(words: str) -> bytes:
    """A text of the format: its length, and its bytes."""
    data = words.encode()
    return struct.pack("<Q", len(data)) + data


def raw(folder: Path, *entries: bytes, tensors: Sequence[bytes] = (), data: bytes = b"") -> Path:
    """Write a file of version 3 with entries of metadata and of tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    file = folder / "m.gguf"
    file.write_bytes(head + b"".join(entries) + b"".join(tensors) + data)
    return file


def listed(name: str, kind: int, count: int, items: bytes) -> bytes:
    """An entry with a list: its name, type 9, the type and the number of its items, and these."""
    return text(name) + struct.pack("<IIQ", 9, kind, count) + items


def tensor(name: str, *shape: int, kind: int = 0, start: int = 0) -> bytes:
    """An entry of a tensor; `shape` as in the file, the rows last."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


WORDS = ["a", "", "\u4f60\u597d", "bc"]


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([], {}),
        ([0], {0: "a"}),
        ([3, 1], {1: "", 3: "bc"}),
        ([2, 4, 9], {2: "\u4f60\u597d"}),
        ([4], {}),
        (range(4), dict(enumerate(WORDS))),
    ],
    ids=str,
)
def test_texts_at_some_places_are_read_whether_or_not_the_list_was_kept(
    texts: bool, places: Sequence[int], wanted: Mapping[int, str], tmp_path: Path
) -> None:
    items = b"".join(map(text, WORDS))
    file = raw(tmp_path, listed("words", 8, 4, items), listed("other", 8, 1, text("z")))
    found = read_header(file, texts=texts)
    assert ("words" in found.metadata, "words" in found.left_out) == (texts, not texts)
    assert found.some_texts("words", places) == wanted
    assert found.some_texts("other", [0]) == {0: "z"}


def test_a_key_without_a_list_has_no_texts(tmp_path: Path) -> None:
    found = read_header(raw(tmp_path, text("name") + struct.pack("<I", 8) + text("abc")))
    assert found.some_texts("name", [0]) == found.some_texts("nowhere", [0]) == {}


def test_bytes_that_are_no_utf8_are_replaced_in_names_and_lists(tmp_path: Path) -> None:
    bad = struct.pack("<Q", 2) + b"\xffa"
    file = raw(tmp_path, bad + struct.pack("<I", 8) + bad, listed("words", 8, 1, bad))
    for texts in (False, True):
        found = read_header(file, texts=texts)
        assert found.metadata["\ufffda"] == "\ufffda"
        assert found.some_texts("words", [0]) == {0: "\ufffda"}


def test_lists_of_lists_are_read_item_by_item(tmp_path: Path) -> None:
    items = struct.pack("<IQ2i", 5, 2, 7, -8) + struct.pack("<IQ", 6, 0) + struct.pack("<IQ1f", 6, 1, 0.5)
    file = raw(tmp_path, listed("lists", 9, 3, items), text("after") + struct.pack("<IB", 0, 9))
    assert read_header(file).metadata == {"lists": [[7, -8], [], [0.5]], "after": 9}


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("length", [5, 2**40, 2**63])
def test_a_text_that_ends_behind_the_file_is_damage(length: int, texts: bool, tmp_path: Path) -> None:
    last = struct.pack("<Q", length) + b"abcd"
    for entry in (listed("words", 8, 1, last), text("name") + struct.pack("<I", 8) + last):
        with pytest.raises(CheckpointError, match="is damaged: it ends inside its header; download it again"):
            read_header(raw(tmp_path, entry), texts=texts)
    whole = struct.pack("<Q", 4) + b"abcd"
    for entry in (listed("words", 8, 1, whole), text("words") + struct.pack("<I", 8) + whole):
        assert read_header(raw(tmp_path, entry), texts=texts)


@pytest.mark.parametrize(("kind", "count"), [(0, 2**62), (10, 2**61), (5, 2**63), (0, 5)])
def test_a_list_of_more_items_than_the_file_has_is_damage(kind: int, count: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is damaged: it ends inside its header; download it again"):
        read_header(raw(tmp_path, listed("numbers", kind, count, bytes(4))))


@pytest.mark.parametrize(("count", "shape"), [(1, (4, 3)), (2, (2,)), (1, ())])
def test_the_last_tensor_may_end_with_the_file(count: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    size = 4 * int(np.prod(shape))
    tensors = [tensor(f"t{n}", *shape, start=size * n) for n in range(count)]
    bare = len(raw(tmp_path, tensors=tensors).read_bytes())
    padding = bytes(-bare % 32)
    whole = bytes(size * count)
    found = read_header(raw(tmp_path, tensors=tensors, data=padding + whole)).tensors
    assert [each.shape for each in found.values()] == [shape[::-1]] * count
    assert max(each.end for each in found.values()) == bare + len(padding) + len(whole)
    with pytest.raises(CheckpointError, match=f"'t{count - 1}' ends at {bare + len(padding) + len(whole)}; download"):
        read_header(raw(tmp_path, tensors=tensors, data=padding + whole[1:]))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (struct.pack("<II", 4, 0), "0"),
        (struct.pack("<Ii", 5, -32), "-32"),
        (struct.pack("<If", 6, 32.0), "32.0"),
        (struct.pack("<I", 8) + text("32"), "'32'"),
    ],
)
def test_an_alignment_that_is_no_number_of_bytes_is_damage(entry: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"is damaged: it says general.alignment = {said}; download it again"):
        read_header(raw(tmp_path, text("general.alignment") + entry))


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_part_of_a_file_is_told_how_to_be_joined(count: int, tmp_path: Path) -> None:
    file = raw(tmp_path, text("split.count") + struct.pack("<IH", 2, count))
    with pytest.raises(CheckpointError, match=f"is one of {count} parts; wanted one file; join them with llama-gguf"):
        read_header(file)


def test_blocks_are_of_a_rows_elements_and_not_of_its_rows(tmp_path: Path) -> None:
    found = read_header(raw(tmp_path, tensors=[tensor("w", 64, 3, kind=8)], data=bytes(512))).tensors["w"]
    assert (found.shape, found.end - found.start) == ((3, 64), 3 * 2 * 34)
    with pytest.raises(CheckpointError, match="'w' has rows of 3 elements, and Q8_0 has blocks of 32"):
        read_header(raw(tmp_path, tensors=[tensor("w", 3, 64, kind=8)], data=bytes(512)))


def test_only_a_file_with_its_suffix_is_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for name in ("m.gguf", "m.bin", "gguf"):
        (tmp_path / name).touch()
    found = {name: is_gguf(tmp_path / name) for name in ("m.gguf", "m.bin", "gguf", "folder.gguf", "nowhere.gguf")}
    assert found == {"m.gguf": True, "m.bin": False, "gguf": False, "folder.gguf": False, "nowhere.gguf": False}
    assert is_gguf(str(tmp_path / "m.gguf"))


def small(folder: Path, arch: str = "llama") -> Path:
    """Write a whole model of one block."""
    writer = GGUFWriter(folder / "m.gguf", arch)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_feed_forward_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, rows in (("token_embd", 8), ("blk.0.attn_q", 16)):
        writer.add_tensor(f"{name}.weight", np.zeros((rows, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def test_a_file_is_read_for_the_architectures_that_are_run_and_for_its_task(tmp_path: Path) -> None:
    file = small(tmp_path)
    for known in ((), {"LlamaForCausalLM"}):
        assert read_config(file, known).architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match="the architecture 'LlamaForCausalLM' is not supported; wanted one that docs"):
        read_config(file, {"Qwen3ForCausalLM"})
    assert read_config(file).pooling is None
    pooling = read_config(file, task="embed").pooling
    assert pooling is not None and (pooling.modes, pooling.is_normalized) == (("lasttoken",), True)


@pytest.mark.parametrize(("arch", "window"), [("phi3", None), ("olmo2", None), ("gemma2", 4096), ("gemma3", 4096)])
def test_a_window_of_zero_is_none_unless_the_architecture_has_a_default(arch: str, window: int | None) -> None:
    for given in ({}, {f"{arch}.attention.sliding_window": 0}):
        assert gguf_config(header({**renamed(arch), **given}))["sliding_window"] == window
    assert gguf_config(header({**renamed(arch), f"{arch}.attention.sliding_window": 7}))["sliding_window"] == 7


def test_olmo_with_a_window_is_the_third_with_one_rotary_base() -> None:
    plain = gguf_config(header(renamed("olmo2")))
    assert plain["architectures"] == ["Olmo2ForCausalLM"] and "rope_local_base_freq" not in plain
    given = {"olmo2.attention.sliding_window": 7, "olmo2.rope.freq_base": 3e5}
    found = gguf_config(header({**renamed("olmo2"), **given}))
    assert (found["architectures"], found["rope_local_base_freq"]) == (["Olmo3ForCausalLM"], 3e5)


@pytest.mark.parametrize(("count", "name"), [(0, "LlamaForCausalLM"), (4, "MixtralForCausalLM")])
def test_a_llama_with_experts_is_a_mixtral(count: int, name: str) -> None:
    found = gguf_config(header({**METADATA, "llama.expert_count": count, "llama.expert_used_count": 2}))
    assert found["architectures"] == [name]
    wanted = (4, 2) if count else (None, None)
    assert (found.get("num_local_experts"), found.get("num_experts_per_tok")) == wanted


OWN: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    (
        "granite",
        {"attention.scale": 0.5, "embedding_scale": 3.0, "residual_scale": 0.25, "logit_scale": 7.0},
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 7.0,
        },
    ),
    (
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    ("gemma3", {"rope.freq_base_swa": 7e3}, {"rope_local_base_freq": 7e3}),
    (
        "qwen2moe",
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 40,
        },
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    (
        "qwen3moe",
        {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24},
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
)


@pytest.mark.parametrize(("arch", "given", "wanted"), OWN, ids=lambda value: value if isinstance(value, str) else "")
def test_numbers_that_only_some_architectures_have_are_theirs(
    arch: str, given: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    found = gguf_config(header({**renamed(arch), **{f"{arch}.{key}": value for key, value in given.items()}}))
    assert {name: found[name] for name in wanted} == wanted
    bare = gguf_config(header(renamed(arch)))
    assert not wanted.keys() & bare.keys() - {"norm_topk_prob"}


TOKENS = ["a", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "</s>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ([3] * 6, (1, 2, 3, 5)),
        ([1, 3, 1, 1, 3, 1], (1,)),
        ([1, 4, 4, 4, 3, 3], (5,)),
        ([1, 2, 4, 5, 6, 1], ()),
        ([1] * 6, ()),
        (None, ()),
    ],
)
def test_usual_tokens_that_end_a_text_are_control_tokens(kinds: list[int] | None, wanted: tuple[int, ...]) -> None:
    given = {} if kinds is None else {"tokenizer.ggml.token_type": kinds}
    assert end_tokens(header({**METADATA, "tokenizer.ggml.tokens": TOKENS, **given})) == wanted


def with_factors(folder: Path, metadata: Mapping[str, Any], **factors: Sequence[float]) -> GgufHeader:
    """A header in memory with tensors of factors, which are in a file."""
    file, tensors, at = folder / "f.gguf", dict(header().tensors), 0
    file.write_bytes(b"".join(struct.pack(f"<{len(each)}f", *each) for each in factors.values()))
    for name, each in factors.items():
        full = f"{name}.weight"
        tensors[full] = GgufTensor(full, "F32", (len(each),), at, at + 4 * len(each))
        at += 4 * len(each)
    return GgufHeader(file, metadata, tensors, {})


SCALED = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


def test_two_lists_of_factors_are_longropes_whatever_the_kind_says(tmp_path: Path) -> None:
    lists = {"rope_factors_long": [2.0, 4.0], "rope_factors_short": [1.0, 1.5]}
    found = gguf_config(with_factors(tmp_path, {**METADATA, **SCALED}, **lists))["rope_parameters"]
    assert (found["rope_type"], found["long_factor"], found["short_factor"]) == ("longrope", [2.0, 4.0], [1.0, 1.5])
    assert not {"factor", "attention_factor"} & found.keys()
    for name in lists:
        alone = gguf_config(with_factors(tmp_path, {**METADATA, **SCALED}, **{name: lists[name]}))["rope_parameters"]
        assert (alone["rope_type"], alone["factor"]) == ("linear", 4.0) and "long_factor" not in alone


def test_a_single_list_of_factors_changes_no_amplitude(tmp_path: Path) -> None:
    found = gguf_config(with_factors(tmp_path, METADATA, rope_freqs=[1.0, 8.0]))["rope_parameters"]
    assert (found["rope_type"], found["attention_factor"]) == ("longrope", 1.0)
    assert found["long_factor"] == found["short_factor"] == [1.0, 8.0]


@pytest.mark.parametrize("kind", ["longrope", "dynamic", 3])
def test_a_scaling_of_another_kind_is_refused_by_its_name(kind: Any) -> None:
    with pytest.raises(CheckpointError, match=f"scales positions by {kind!r}; wanted none, linear or yarn"):
        gguf_config(header({**METADATA, "llama.rope.scaling.type": kind}))


def test_single_numbers_for_each_layer_of_a_file_are_not_read_as_matrices() -> None:
    assert all(len(shape) == 2 for shape in SHAPES.values())
    tensors = {
        **{name: GgufTensor(name, "F16", shape, 0, 0) for name, shape in SHAPES.items()},
        "blk.0.attn_q.bias": GgufTensor("blk.0.attn_q.bias", "F32", (64,), 0, 0),
    }
    assert gguf_config(GgufHeader(Path("m.gguf"), METADATA, tensors, {}))["dtype"] == "float16"
