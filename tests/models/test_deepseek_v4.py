"""DeepSeek-V4's checkpoints as they are read, and its layer that predicts one token more, in float32."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.checkpoint.config import read_config
from sglcore.device.batch import ForwardMode
from sglcore.device.errors import CheckpointError
from sglcore.models.deepseek_v4 import NEXT_TOKEN, DeepseekV4NextN, next_token_config
from sglcore.models.loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from tests.deepseek_v4 import SLIDING, deepseek_v4, with_float8, with_module_names, with_published_names
from tests.models.steps import Steps, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_published_names(deepseek_v4(), tmp_path_factory.mktemp("published"))


def load_next_token(folder: Path, **options: Any) -> Any:
    """The layer that predicts one token more."""
    config = next_token_config(read_config(folder))
    given = {"architectures": NEXT_TOKEN, "kernels": KernelTable(), "device": "cpu", "dtype": torch.float32, **options}
    return load_model(folder, config, **given)


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
    kept += [attention.sinks, attention.kv_norm, router.bias, router._gate.weight, hashed._gate.weight]
    kept += [each for part in (attention.compressor, attention.indexer.compressor) for each in (part.ape, part.weight)]
    assert {each.dtype for each in kept} == {torch.float32}
    assert layer.mlp.experts.w13.dtype is torch.bfloat16


def test_tables_of_experts_have_whole_numbers_of_either_size(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    weights, found = load_file(folder / "model.safetensors"), []
    for dtype in (torch.int32, torch.int64):
        changed = {name: each.to(dtype) for name, each in weights.items() if name.endswith("tid2eid")}
        save_file({**weights, **changed}, tmp_path / "model.safetensors")
        found.append(load(tmp_path).layers[0].mlp.experts._route.table)
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


class Drafting(DeepseekV4NextN):
    """Of streams that a test has put beside the batch."""

    streams: Tensor
    after: Tensor

    def __call__(self, batch: Any) -> Tensor:
        hidden, self.after = self.draft(batch, self.streams)
        return hidden


def transformers_draft(folder: Path, ids: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """By the modules of transformers: a layer with the window alone, and the ends of a model around it."""
    one = {"num_hidden_layers": 1, "layer_types": (SLIDING,), "mlp_layer_types": ("moe",)}
    model, stored = deepseek_v4(**one), load_file(folder / "model.safetensors")
    own = {DeepseekV4NextN.own_name(name): values for name, values in stored.items()}
    experts = [f"model.layers.0.mlp.experts.{expert}" for expert in range(8)]
    gate_up = [torch.cat((own[f"{e}.gate_proj.weight"], own[f"{e}.up_proj.weight"])) for e in experts]
    own["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    own["model.layers.0.mlp.experts.down_proj"] = torch.stack([own[f"{e}.down_proj.weight"] for e in experts])
    model.load_state_dict({name: own[name] for name in model.state_dict()})
    own_norm = partial(torch.nn.functional.rms_norm, normalized_shape=(64,), eps=1e-6)
    begun = own_norm(model.model.embed_tokens(ids), weight=own["model.enorm.weight"]) @ own["model.e_proj.weight"].T
    before = own_norm(streams, weight=own["model.hnorm.weight"]) @ own["model.h_proj.weight"].T
    places = torch.arange(len(ids))
    distance = places.unsqueeze(1) - places
    mask = torch.zeros(len(ids), len(ids)).masked_fill((distance < 0) | (distance >= 16), -torch.inf)
    turned = {"main": model.model.rotary_emb(begun, places.unsqueeze(0), layer_type="main")}
    after = model.model.layers[0](
        (begun.unsqueeze(1) + before).unsqueeze(0),
        input_ids=ids.unsqueeze(0),
        position_embeddings=turned,
        position_ids=places.unsqueeze(0),
        attention_mask=mask[None, None],
    )
    return model.model.norm(model.model.hc_head(after))[0], after[0]


@torch.no_grad()
def test_the_layer_of_the_next_token_gives_the_same_whole_in_pieces_and_token_by_token(folder: Path) -> None:
    draft = load_next_token(folder, architectures={"DeepseekV4NextN": f"{__name__}:Drafting"})
    assert [each.rows.keys() for each in draft.attention_layers] == [{"window"}]
    torch.manual_seed(2)
    ids, streams = torch.randint(128, (40,)), torch.randn(40, 4, 64)
    wanted = transformers_draft(folder, ids, streams)
    for pieces in ([40], [7] * 5 + [5], [16, 1, 1, 1, 20, 1], [1] * 40):
        steps, found = Steps(draft), []
        for part, before in zip(ids.split(pieces), streams.split(pieces), strict=True):
            draft.streams, steps.runner.token_table.last[1] = before, part[0]
            mode = ForwardMode.DECODE if len(part) == 1 else ForwardMode.EXTEND
            found.append((steps.hidden({1: part.tolist()}, mode), draft.after))
        for got, expected in zip(zip(*found, strict=True), wanted, strict=True):
            assert (torch.cat(got) - expected).abs().max() < 5e-5


def test_a_checkpoint_without_that_layer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        load_next_token(with_module_names(deepseek_v4(), tmp_path))
