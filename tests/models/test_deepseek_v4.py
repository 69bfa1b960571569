"""Reading DeepSeek-V4's checkpoints, and its next-token (MTP) layer, in float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import CheckpointError
from sglcore.models.drafts.deepseek_v4_nextn import next_token_config
from sglcore.models.drafts.draft_config import draft_classes
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from sglcore.worker.schedule_batch import ForwardMode
from tests.deepseek_v4 import DenseStreams, deepseek_v4, with_float8, with_module_names, with_published_names
from tests.models.steps import Steps, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_published_names(deepseek_v4(), tmp_path_factory.mktemp("published"))


def load_next_token(folder: Path) -> Any:
    """The next-token (MTP) layer, loaded with its target model."""
    config, target = next_token_config(read_config(folder)), load(folder)
    shared = {"model.embed_tokens": target.embed_ids, "lm_head": target.logits}
    given = {"architectures": draft_classes(), "kernels": KernelTable(), "device": "cpu", "dtype": torch.float32}
    return load_model(folder, config, given=shared, **given)


@pytest.mark.parametrize("read", [load, load_next_token], ids=["model", "next-token"])
def test_floats_of_8_bits_are_the_values_that_they_stand_for(folder: Path, read: Any) -> None:
    coded, values = (read(each) for each in with_float8(folder))
    found = zip(coded.weights.parameters, values.weights.parameters, strict=True)
    assert all(torch.equal(left, right) for left, right in found)


def test_what_is_kept_in_float32_is_so_in_a_model_of_bfloat16(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    layer = model.layers[2]
    attention, router, hashed = layer.self_attn.attention, layer.mlp.experts._route, model.layers[0].mlp.experts._route
    kept = [*layer.attn_hc.weights, *model.hc_head.weights, layer.input_layernorm.weight, model.norm.weight]
    kept += [attention.sinks, attention.kv_norm, *router.operands, router.weight, hashed.weight]
    kept += [each for part in (attention.compressor, attention.indexer.compressor) for each in (part.ape, part.weight)]
    assert {each.dtype for each in kept} == {torch.float32}
    assert layer.mlp.experts.weights[0].dtype is torch.bfloat16


def test_tables_of_experts_have_whole_numbers_of_either_size(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    weights, found = load_file(folder / "model.safetensors"), []
    for dtype in (torch.int32, torch.int64):
        changed = {name: each.to(dtype) for name, each in weights.items() if name.endswith("tid2eid")}
        save_file({**weights, **changed}, tmp_path / "model.safetensors")
        found.append(load(tmp_path).layers[0].mlp.experts._route.operands[0])
    assert torch.equal(*found) and torch.equal(found[0], weights["layers.0.ffn.gate.tid2eid"].int())
    save_file({**weights, **{name: each.float() for name, each in changed.items()}}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="tid2eid' in .* has the type F32; wanted one of I32, I64; they are ids: convert"
    ):
        load(tmp_path)


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_table_that_names_an_expert_that_there_is_not_is_refused(folder: Path, tmp_path: Path, wrong: int) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["layers.0.ffn.gate.tid2eid"][3, 1] = wrong
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tid2eid has numbers from .*{wrong}.*wanted 0 to 7"):
        load(tmp_path)


@torch.no_grad()
def test_the_layer_of_the_next_token_gives_the_same_whole_in_pieces_and_token_by_token(folder: Path) -> None:
    draft, dense = load_next_token(folder), DenseStreams(folder)
    assert [each.rows.keys() for each in draft.attention_layers] == [{"window"}]
    torch.manual_seed(2)
    ids, streams = torch.randint(128, (40,)), torch.randn(40, 4 * 64)
    wanted = dense(ids, streams)
    for pieces in ([40], [7] * 5 + [5], [16, 1, 1, 1, 20, 1], [1] * 40):
        steps, found = Steps(draft), []
        for part, before in zip(ids.split(pieces), streams.split(pieces), strict=True):
            steps.runner.token_table.last[1] = part[0]
            mode = ForwardMode.DECODE if len(part) == 1 else ForwardMode.EXTEND
            staged = steps.staged({1: part.tolist()}, mode)
            staged.features = before
            found.append(steps.runner.run_eager(staged))
        whole = torch.cat(found)
        assert (whole - wanted).abs().max() < 5e-5
        assert (draft.logits(whole) - dense.logits(wanted)).abs().max() < 5e-5


def test_a_checkpoint_without_that_layer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        load_next_token(with_module_names(deepseek_v4(), tmp_path))
