"""Language models against the transformers library, in float32, through the paged runtime."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglcore.core.errors import ConfigError
from sglcore.runtime.kernels.grouped_moe import grouped_moe
from sglcore.runtime.kernels.reference_kernels import add_rms_norm, rms_norm
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import (
    CAUSAL,
    LONG,
    gemma3,
    granite_hybrid,
    lfm2_moe,
    llama,
    nemotron_h,
    oracle_logprobs,
    qwen3,
    qwen3_moe,
    qwen3_next,
    qwen35,
    rope,
    save,
)
from tests.latent import LATENT
from tests.models.steps import Steps, load

TOLERANCE = 1e-4


def prompt(length: int, seed: int = 1) -> list[int]:
    """Seeded token ids."""
    print(f"prompt: length {length}, seed {seed}")
    return random.Random(seed).choices(range(97), k=length)


@pytest.fixture(scope="module", params=[*CAUSAL, *LATENT])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """An oracle, and our model of its checkpoint."""
    oracle = {**CAUSAL, **LATENT}[request.param]()
    return oracle, load(save(oracle, tmp_path_factory.mktemp("model")), max_positions=64)


def test_a_whole_prompt_has_the_oracles_log_probabilities(pair) -> None:
    oracle, model = pair
    ids = prompt(23)
    assert (Steps(model).logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE


def test_chunks_and_single_tokens_beside_another_request_give_the_same_as_a_whole_prompt(pair) -> None:
    oracle, model = pair
    ids, other, steps = prompt(23), prompt(9, seed=2), Steps(model)
    got = [steps.logprobs({1: ids[:10]})]
    both = steps.logprobs({1: ids[10:17], 3: other})
    got += [both[:7]]
    got += [steps.logprobs({1: [token]}) for token in ids[17:]]
    assert (torch.cat(got) - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE
    assert (both[7:] - oracle_logprobs(oracle, other)).abs().max() < TOLERANCE


def test_a_step_without_tokens_gives_no_rows(pair) -> None:
    _, model = pair
    assert Steps(model).logprobs({}).shape == (0, 97)


def test_bfloat16_is_as_near_to_float32_as_the_oracles_bfloat16(tmp_path) -> None:
    oracle, ids = qwen3().to(torch.bfloat16), prompt(23)
    steps = Steps(load(save(oracle, tmp_path), dtype=torch.bfloat16))
    got, wanted, exact = steps.logprobs({1: ids}), oracle_logprobs(oracle, ids), oracle_logprobs(oracle.float(), ids)
    assert (got - exact).abs().mean() < 1.5 * (wanted - exact).abs().mean()
    assert (got - wanted).abs().max() < 0.25


@pytest.mark.parametrize("name", ["gemma", "gemma3", "gpt-oss", "granite", "nemotron-h", "olmo2"])
def test_norms_and_embeddings_are_rounded_to_bfloat16_where_the_oracle_rounds(tmp_path, name: str) -> None:
    oracle, ids = CAUSAL[name]().to(torch.bfloat16), torch.arange(97, dtype=torch.int32)
    model = load(save(oracle, tmp_path), dtype=torch.bfloat16)
    with torch.inference_mode():
        found = model.embed_ids(ids) * model.config.options.get("embedding_multiplier", 1.0)
        wanted = oracle.model(ids.long()[None, :64], output_hidden_states=True).hidden_states[0][0]
        assert torch.equal(found[:64], wanted)
        norm = oracle.model.norm_f if name == "nemotron-h" else oracle.model.norm
        assert torch.equal(model.norm(found), norm(found))


def test_a_gate_of_sigmoids_chooses_in_float32_whatever_the_model_computes_in(tmp_path) -> None:
    oracle = CAUSAL["glm4-moe"]().to(torch.bfloat16)
    model = load(save(oracle, tmp_path), dtype=torch.bfloat16)
    hidden = torch.randn(4096, 48, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    with torch.inference_mode():
        wanted = oracle.model.layers[1].mlp(hidden[None])[0]
        assert (model.layers[1].mlp(hidden) - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("make", [granite_hybrid, nemotron_h, qwen3_next, qwen35])
def test_matrices_of_recurrences_stay_in_float32_and_tails_are_as_the_model_computes(tmp_path, make) -> None:
    model = load(save(make(), tmp_path), dtype=torch.bfloat16)
    kept = [{name: state.dtype for name, state in layer.kept.items()} for layer in model.state_layers]
    assert kept == [{"conv": torch.bfloat16, "recurrent": torch.float32}] * 2


def in_place_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` as the table allows it: both results are in the arguments' memory."""
    residual.add_(x)
    return x.copy_(rms_norm(residual, weight, eps)), residual


@pytest.mark.parametrize("kernel", [add_rms_norm, in_place_add_rms_norm])
def test_input_embeddings_take_the_place_of_tokens_and_stay_as_they_are(tmp_path, kernel) -> None:
    oracle = llama()
    steps = Steps(load(save(oracle, tmp_path), kernels=KernelTable().replace(add_rms_norm=kernel)))
    ids = prompt(7)
    batch = steps.staged({1: [0] * 7})
    with torch.inference_mode():
        embeds = oracle.model.embed_tokens.weight[ids].clone()
        batch.input_embeds = embeds.clone()
        got = torch.log_softmax(steps.runner.logits(steps.runner.run_eager(batch), None), dim=-1)
    assert (got - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE
    assert batch.input_embeds is not None and torch.equal(batch.input_embeds, embeds)


@pytest.mark.parametrize(("max_positions", "length"), [(16, 9), (64, 23)])
def test_longrope_uses_the_factors_of_the_length_it_was_opened_for(tmp_path, max_positions: int, length: int) -> None:
    oracle = llama(**rope("longrope", **LONG))
    steps, ids = Steps(load(save(oracle, tmp_path), max_positions=max_positions)), prompt(length)
    assert (steps.logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE


def test_a_replaced_kernel_is_the_one_that_runs(tmp_path) -> None:
    oracle, calls, ids = qwen3_moe(), [], prompt(23)

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(len(arguments))
        return grouped_moe(*arguments)

    steps = Steps(load(save(oracle, tmp_path), kernels=KernelTable().replace(moe=counted)))
    assert (steps.logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE
    assert calls == [5, 5]


def test_swapped_gate_and_up_would_be_noticed(tmp_path) -> None:
    oracle = llama()
    model, ids = load(save(oracle, tmp_path)), prompt(7)
    gate_up = model.layers[1].mlp.gate_up_proj.weight
    gate_up.copy_(gate_up.roll(72, dims=0))
    assert (Steps(model).logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() > 100 * TOLERANCE


def test_a_lost_offset_and_swapped_rotations_would_be_noticed(tmp_path) -> None:
    oracle, ids = gemma3(), prompt(23)
    model = load(save(oracle, tmp_path))
    wanted, kept = oracle_logprobs(oracle, ids), model.rotary.clone()
    model.rotary.copy_(model.local_rotary)
    assert (Steps(model).logprobs({1: ids}) - wanted).abs().max() > 100 * TOLERANCE
    model.rotary.copy_(kept)
    assert (Steps(model).logprobs({1: ids}) - wanted).abs().max() < TOLERANCE
    model.layers[1].norms[1].weight.sub_(1)
    assert (Steps(model).logprobs({1: ids}) - wanted).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen3.5-moe", "glm4-moe", "lfm2-moe"])
def test_experts_in_one_tensor_are_those_in_many(tmp_path, name: str) -> None:
    oracle, ids = CAUSAL[name](), prompt(9)
    oracle.save_pretrained(tmp_path, save_original_format=False)
    assert any(each.endswith(".experts.down_proj") for each in load_file(tmp_path / "model.safetensors"))
    assert (Steps(load(tmp_path)).logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(lfm2_moe, "use_expert_bias", False), (nemotron_h, "mamba_hidden_act", "gelu"), (qwen35, "hidden_act", "gelu")],
)
def test_what_hybrids_do_not_heed_is_refused(tmp_path, make, name: str, value: object) -> None:
    folder = save(make(), tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        load(folder)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (nemotron_h, "mtp.layers.0.norm.weight"),
        (nemotron_h, "model.mtp.layers.0.norm.weight"),
        (qwen3_next, "mtp.norm.weight"),
        (qwen35, "mtp.norm.weight"),
        (qwen35, "model.visual.pos_embed.weight"),
        (qwen35, "vision_tower.pos_embed.weight"),
        (CAUSAL["glm4-moe"], "model.layers.2.enorm.weight"),
    ],
)
def test_what_predicts_further_tokens_or_sees_is_left_unread(tmp_path, make, name: str) -> None:
    file = save(make(), tmp_path) / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(3)}, file)
    load(tmp_path)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "rope_local_base_freq", "use_bidirectional_attention"])
def test_what_an_architecture_does_not_heed_is_refused(tmp_path, name: str) -> None:
    folder = save(llama(), tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: 7.0}))
    with pytest.raises(ConfigError, match=f"has {name} = 7.0, which is not supported for LlamaForCausalLM"):
        load(folder)


def test_another_rotary_base_would_be_noticed(tmp_path) -> None:
    oracle, ids = llama(), prompt(7)
    model = load(save(oracle, tmp_path))
    model.rotary.copy_(load(save(llama(**rope("linear", factor=1.5)), tmp_path / "b")).rotary)
    assert (Steps(model).logprobs({1: ids}) - oracle_logprobs(oracle, ids)).abs().max() > 100 * TOLERANCE
