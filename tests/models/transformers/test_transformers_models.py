"""Models run by transformers' own classes: a sample of the supported types, the choice of
implementation, and all refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.models.implementation import choose_implementation
from sglcore.models.transformers_backend.attention_adapter import Several
from sglcore.models.transformers_backend.shape_walk import AttentionCall, DoesNotRun, walk, window_of
from sglcore.models.transformers_backend.transformers_config import UNBOUNDED, Library, described
from sglcore.models.transformers_backend.verified_types import PROVEN, VERSION
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.reference_kernels import add_rms_norm, moe, quantize_linear
from sglcore.runtime.kernels.table import KernelTable, Limited
from tests.checkpoints import exaone4, gemma3, llama, save
from tests.models.steps import Steps
from tests.models.transformers_cases import compare, exacting, load, sizes_of, tiny_model

SAMPLE = (
    "gemma2",  # softcap, sliding windows, norms around each block
    "gemma3_text",  # a rotary embedding per kind of layer
    "gpt_oss",  # sinks, experts with biases stored interleaved
    "mixtral",  # experts stored one by one
    "glm4",  # partial rotary
    "phi3",  # fused projections
    "olmo3",
    "granite",  # multipliers everywhere
    "gpt2",  # learned positions, transposed weights
    "deepseek_v3",  # latent attention as plain heads, values narrower than keys
    "apertus",  # stored parameters of the activation
    "diffllama",  # two attention calls per layer
    "opt",  # the head calls a part of the decoder
)


@pytest.mark.parametrize("kind", SAMPLE)
def test_chunks_beside_another_request_and_single_tokens_are_transformers_own(kind: str, tmp_path: Path) -> None:
    assert kind in PROVEN
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) < 2e-4


def test_the_compared_version_is_the_one_of_the_tests() -> None:
    assert transformers.__version__ == VERSION, "run tools/sweep_models.py --write"


# -- choice
# --------------------------------------------------------------------------------------------------


def chosen(folder: Path, asked: str = "auto") -> tuple[Any, Mapping[str, str], str]:
    """The configuration, the architectures added to the registry, and the ledger's row."""
    ledger = DecisionLedger()
    config, added = choose_implementation(asked, folder, ledger)
    (row,) = ledger.rows
    assert row.topic == "model impl" and not row.downgrade
    return config, added, f"{row.effective}: {row.reason}"


def rewritten(folder: Path, **changes: Any) -> Path:
    """The folder, with changes to its configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return save(exaone4(max_position_embeddings=80), tmp_path)


POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_target_positions",
    "max_sequence_length",
    "n_ctx",
)


@pytest.mark.parametrize("kind", sorted(PROVEN))
def test_the_context_is_what_the_type_calls_its_positions(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    text = config.get_text_config(decoder=True)
    known = {name: getattr(text, name, None) for name in POSITIONS if getattr(text, name, None) is not None}
    raw = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
    found = described(Path(), raw, Library(config), "generate").context_length
    assert found in known.values() if known else found == UNBOUNDED, (kind, found, known)


def test_an_architecture_without_a_file_runs_by_transformers_class(foreign: Path) -> None:
    config, added, row = chosen(foreign)
    assert list(added) == ["Exaone4ForCausalLM"] and config.context_length == 80 and config.vocab_size == 97
    assert row.startswith("transformers: sglcore does not implement Exaone4ForCausalLM")


def test_code_that_a_checkpoint_of_a_compared_type_brings_is_passed_by(foreign: Path) -> None:
    brought = {"AutoModelForCausalLM": "own.Exaone4ForCausalLM"}
    assert chosen(rewritten(foreign, auto_map=brought))[2].startswith("transformers: ")


@pytest.mark.parametrize(("stored", "dtype"), [({"dtype": "bfloat16"}, "bfloat16"), ({}, "float32")])
def test_the_dtype_is_the_checkpoints(foreign: Path, stored: dict[str, str], dtype: str) -> None:
    values = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(
        json.dumps({**{name: values[name] for name in values if name != "dtype"}, **stored})
    )
    assert chosen(foreign)[0].dtype == dtype


def test_one_with_a_file_runs_by_it_unless_the_other_is_asked_for(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    assert chosen(folder)[2].startswith(
        "native: sglcore implements LlamaForCausalLM in sglcore.models.architectures.llama"
    )
    assert not chosen(folder, "native")[1]
    assert chosen(folder, "transformers")[2].startswith("transformers: requested")


def test_what_can_not_be_served_is_one_line_that_says_why(foreign: Path) -> None:
    with pytest.raises(
        ConfigError, match="does not implement the architecture 'Exaone4ForCausalLM'; .*leave --model-impl out"
    ):
        chosen(foreign, "native")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    by_length = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    kept = (foreign / "config.json").read_text()
    for changes, words in (
        ({"model_type": "rwkv"}, "transformers' type 'rwkv' is not among"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "brings code of its own"),
        ({"architectures": ["Exaone4ForSequenceClassification"]}, "of type 'exaone4' is Exaone4ForCausalLM"),
        ({"rope_parameters": rope}, "the rope type 'dynamic'"),
        ({"rope_parameters": by_length}, "the rope type 'longrope'"),
        ({"attn_temperature_tuning": True}, "counts the tokens of a step instead of a request's"),
        ({"num_attention_heads": "four"}, "transformers refuses"),
        ({"architectures": "Exaone4ForCausalLM"}, "wanted a list of texts"),
    ):
        (foreign / "config.json").write_text(kept)
        with pytest.raises(ConfigError, match=words):
            chosen(rewritten(foreign, **changes))


def test_what_the_class_refuses_is_one_line_too(foreign: Path) -> None:
    config, extra, _ = chosen(rewritten(foreign, hidden_act="warp"))
    with pytest.raises(ConfigError, match="Exaone4ForCausalLM of transformers refuses .*: KeyError: 'warp'; download"):
        load_model(
            foreign,
            config,
            kernels=KernelTable(),
            device="cpu",
            dtype=torch.float32,
            max_positions=64,
            architectures=extra,
        )


def test_rope_types_of_one_kind_of_layers_are_refused_too(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    with pytest.raises(ConfigError, match="the rope type 'dynamic'"):
        chosen(rewritten(save(gemma3(), tmp_path), rope_parameters=kinds), "transformers")


def test_a_device_without_torch_has_files_of_ours_alone(foreign: Path) -> None:
    with pytest.raises(ConfigError, match="which this device does not have"):
        choose_implementation("transformers", foreign, DecisionLedger(), has_torch=False)
    with pytest.raises(ConfigError, match="'Exaone4ForCausalLM' is not supported"):
        choose_implementation("auto", foreign, DecisionLedger(), has_torch=False)


def test_another_version_than_the_compared_one_is_a_downgrade(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "9.9.9")
    ledger = DecisionLedger()
    choose_implementation("auto", foreign, ledger)
    assert ledger.rows[0].downgrade and "9.9.9 is installed" in ledger.rows[0].reason


def test_without_transformers_the_remedy_is_to_install_it(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.models.implementation.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sglcore\[transformers\]'"):
        chosen(foreign)


# -- weights
# --------------------------------------------------------------------------------------------------


class Saved:
    """Stands for a model that saves itself; writes other weights."""

    def __init__(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        self._folder, self._weights = folder, dict(weights)

    def save_pretrained(self, where: Path) -> None:
        """Write the configuration and the other weights."""
        where.mkdir()
        (where / "config.json").write_text((self._folder / "config.json").read_text())
        save_file(self._weights, where / "model.safetensors")


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_a_weight_that_is_missing_or_left_over_is_named(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, sizes_of(kind))
    folder = save(model, tmp_path / "whole")
    weights = load_file(folder / "model.safetensors")
    last = max(name for name in weights if "layers.1" in name and ("down_proj" in name or "w2" in name))

    def compared(changed: Mapping[str, torch.Tensor]) -> None:
        compare(Saved(folder, changed), tmp_path / str(len(changed)))  # pyright: ignore[reportArgumentType]

    with pytest.raises(CheckpointError, match=last.rpartition("layers.1.")[2].partition(".")[2].replace(".", r"\.")):
        compared({name: weight for name, weight in weights.items() if name != last})
    with pytest.raises(CheckpointError, match="model.layers.1.surplus"):
        compared({**weights, "model.layers.1.surplus": torch.ones(2)})


@pytest.mark.parametrize(
    ("kind", "prefix", "surplus"),
    [
        ("gpt2", "transformer.", "h.0.attn.bias"),  # a mask in the files of the first GPT-2
        ("glm4_moe", "", "model.layers.46.eh_proj.weight"),  # a next-token (MTP) layer
        ("gemma2", "", "lm_head.weight"),  # tied output layer
    ],
)
def test_what_transformers_leaves_unread_in_files_is_left_unread(
    kind: str, prefix: str, surplus: str, tmp_path: Path
) -> None:
    model = tiny_model(kind, sizes_of(kind))
    model.save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    load(Saved(tmp_path / "whole", {**weights, surplus: torch.ones(4, 4)}), tmp_path / "more")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "operations",
    [[Transpose(0, 1)], [Chunk(0)], [Interleave(0), Concatenate(0)], [MergeModulelist(0), Transpose(0, 1)]],
)
def test_a_conversion_of_weights_that_is_not_done_here_is_refused(
    operations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", sizes_of("llama"))
    model.save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    renamed = {name.replace("self_attn.q_proj", "self_attn.query"): weight for name, weight in weights.items()}
    converter = WeightConverter("self_attn.query.weight", "self_attn.q_proj.weight", operations=operations)
    monkeypatch.setattr(
        "sglcore.models.transformers_backend.weight_names.get_model_conversion_mapping", lambda model: [converter]
    )
    with pytest.raises(
        ConfigError, match=r"query.weight' becomes .*q_proj.weight' by a conversion that is not supported"
    ):
        load(Saved(tmp_path / "whole", renamed), tmp_path / "more")  # pyright: ignore[reportArgumentType]


def test_layers_behind_the_last_that_the_configuration_tells_are_left_unread(tmp_path: Path) -> None:
    model = tiny_model("llama", sizes_of("llama"))
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")

    def loaded(layer: int) -> None:
        surplus = {f"model.layers.{layer}.eh_proj.weight": torch.ones(4, 4)}
        load(Saved(tmp_path / "whole", {**weights, **surplus}), tmp_path / str(layer))  # pyright: ignore[reportArgumentType]

    loaded(model.config.num_hidden_layers)
    with pytest.raises(CheckpointError, match="model.layers.0.eh_proj"):
        loaded(0)


@pytest.mark.parametrize(
    ("kind", "changes", "by_kernel"),
    [
        ("mixtral", {}, True),
        ("mixtral", {"hidden_act": "gelu"}, False),
        ("minimax_m3_vl_text", {}, False),  # its own gate function
    ],
)
def test_experts_of_the_kernels_form_are_the_kernels(
    kind: str, changes: dict[str, Any], by_kernel: bool, tmp_path: Path
) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> torch.Tensor:
        calls.append(1)
        return moe(*given)

    table = KernelTable().replace(moe=counted)
    assert compare(tiny_model(kind, {**sizes_of(kind), **changes}), tmp_path, kernels=table) < 2e-4
    assert bool(calls) is by_kernel


def test_experts_get_weights_of_their_rows_dtype(tmp_path: Path) -> None:
    """Mixtral's class always routes in float32, but kernels take one dtype."""
    given: list[torch.dtype] = []

    def seen(hidden: torch.Tensor, weights: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        given.append(weights.dtype)
        return moe(hidden, weights, *others)

    model = load(tiny_model("mixtral", sizes_of("mixtral")), tmp_path, torch.bfloat16, KernelTable().replace(moe=seen))
    assert Steps(model).hidden({1: [5, 9, 7]}).dtype is torch.bfloat16
    assert set(given) == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "float32"), ("float32", "float32")])
def test_what_a_class_keeps_in_float32_is_kept(dtype: str, kept: str, tmp_path: Path) -> None:
    model = load(tiny_model("ernie4_5_moe", sizes_of("ernie4_5_moe")), tmp_path, getattr(torch, dtype))
    own = {name: parameter.dtype for name, parameter in model._decoder.state_dict().items()}
    assert {own[name] for name in own if name.endswith("gate.weight")} == {getattr(torch, kept)}
    assert {own[name] for name in own if "experts" in name} == {getattr(torch, dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ernie4_5_moe", "gpt_oss", "longcat_flash"])
def test_weights_have_the_types_that_transformers_loads_them_in(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Some weights stay float32 in both half types, others in float16 only, because of its small
    range."""
    loaded = load(tiny_model(kind, sizes_of(kind)), tmp_path, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).base_model.state_dict()
    own = loaded._decoder.state_dict()
    wide = {name for name, each in theirs.items() if each.dtype is torch.float32}
    assert {name for name, each in own.items() if each.dtype is torch.float32} & theirs.keys() <= wide
    assert {name for name in wide if name in own and own[name].dtype is not torch.float32} == set()
    assert {name for name in wide if "norm" in name} <= own.keys()


@pytest.mark.parametrize(("dtype", "is_kept"), [("float16", True), ("bfloat16", False)])
def test_a_norm_that_a_class_keeps_in_float32_is_not_replaced(dtype: str, is_kept: bool, tmp_path: Path) -> None:
    """For example, gpt-oss keeps its norms in float32 when the rest is float16; a replacement would
    compute in the model's dtype."""
    model = load(
        tiny_model("gpt_oss", {**sizes_of("gpt_oss"), "num_local_experts": 4}), tmp_path, getattr(torch, dtype)
    )
    norms = {name: each.dtype for name, each in model._decoder.state_dict().items() if "norm" in name}
    assert set(norms.values()) == ({torch.float32} if is_kept else set())
    assert len(norms) == (7 if is_kept else 0)


def test_linear_layers_are_packed_as_those_of_a_native_model(tmp_path: Path) -> None:
    """Except the output layer; gates may not be rounded, because that would change the chosen
    experts."""
    model = load(tiny_model("mixtral", sizes_of("mixtral")), tmp_path, torch.float32)
    packed = {name: layer.may_round for layer in model.weights.linears for name in layer.names}
    attention = {f"model.layers.{layer}.self_attn.{name}_proj.weight": True for layer in range(3) for name in "qkvo"}
    assert packed == attention | {f"model.layers.{layer}.mlp.gate.weight": False for layer in range(3)}


def test_the_store_is_chosen_for_the_layers_cells(tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def takes(key: torch.Tensor, *_: Any) -> str:
        asked.append(tuple(key.shape))
        return ""

    table = KernelTable().replace(store_kv=Limited(KernelTable().store_kv, takes))
    load(tiny_model("gemma2", sizes_of("gemma2")), tmp_path, kernels=table)
    assert asked == [(1, 2, 16)]


def test_rounded_linear_layers_are_those_of_the_native_model(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    table = KernelTable().replace(quantize_linear=quantize_linear)
    given: dict[str, Any] = {"kernels": table, "device": "cpu", "dtype": torch.float32, "quantize": "int8"}
    config, added = choose_implementation("transformers", tmp_path, DecisionLedger())
    found, wanted = (
        Steps(load_model(tmp_path, each, architectures=names, **given)).hidden({1: [5, 9, 7, 11]})
        for each, names in ((config, added), (read_config(tmp_path), {}))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    plain = Steps(load_model(tmp_path, config, architectures=added, **{**given, "quantize": "auto"}))
    assert float((plain.hidden({1: [5, 9, 7, 11]}) - found).abs().max()) > 1e-4


def test_a_weight_that_got_another_form_is_given_up(tmp_path: Path) -> None:
    plain: list[StorageWeakRef] = []

    def seen(weight: torch.Tensor, kind: str) -> torch.Tensor:
        plain.append(StorageWeakRef(weight.untyped_storage()))
        return quantize_linear(weight, kind)

    save(llama(), tmp_path)
    config, added = choose_implementation("transformers", tmp_path, DecisionLedger())
    table = KernelTable().replace(quantize_linear=seen)
    model = load_model(
        tmp_path, config, architectures=added, kernels=table, device="cpu", dtype=torch.float32, quantize="int8"
    )
    assert len(plain) == len(model.weights.linears) + 1 and all(each.expired() for each in plain)


@pytest.fixture(scope="module", params=["gemma2", "phi"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two models in bfloat16: one with logits by the engine, and one with logits that its class
    changes."""
    kind = request.param
    return load(tiny_model(kind, sizes_of(kind)), tmp_path_factory.mktemp("half"), torch.bfloat16)


def test_logits_are_float32_in_whatever_a_model_computes(half: Any) -> None:
    assert half.logits(torch.zeros(2, 64, dtype=torch.bfloat16)).dtype is torch.float32


def test_a_step_without_tokens_gives_none(half: Any) -> None:
    found = half(ForwardBatch(num_tokens=0))
    assert (found.shape, found.dtype) == ((0, 64), torch.bfloat16)


def used_up(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    """`add_rms_norm` as on devices: it writes its results into its arguments."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return x.copy_(normed), residual.copy_(total)


@pytest.mark.parametrize("kind", ["mixtral", "llama", "gpt2"])
def test_embeddings_take_the_place_of_tokens_and_stay_what_they_are(kind: str, tmp_path: Path) -> None:
    kernels = exacting().replace(add_rms_norm=used_up)
    model = load(tiny_model(kind, sizes_of(kind)), tmp_path, kernels=kernels)
    steps, tokens = Steps(model), [5, 9, 7]
    wanted, batch = steps.hidden({1: tokens}), steps.staged({2: tokens})
    with torch.inference_mode():
        given = model._decoder.get_input_embeddings()(torch.tensor(tokens))
        taken = batch.input_embeds = given.clone()
        batch.input_ids = torch.zeros_like(batch.input_ids)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(steps.runner.run_eager(batch), wanted)
        assert torch.equal(taken, given)


@pytest.mark.parametrize("kind", ["llama", "diffllama", "qwen3", "bloom"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_forward_that_failed_leaves_nothing_to_the_next(
    kind: str, place: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At any attention call; one of these classes makes two per layer."""
    model, ids = load(tiny_model(kind, {**sizes_of(kind), "num_hidden_layers": 4}), tmp_path), [5, 9, 7, 11]
    wanted, own, calls = Steps(model).logprobs({1: ids}), BackendAttention.__call__, [0]

    def failing(self: BackendAttention, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == place + 1:
            raise RuntimeError("planted")
        return own(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(BackendAttention, "__call__", failing)
        with pytest.raises(RuntimeError, match="planted"):
            Steps(model).logprobs({1: ids[::-1]})
    assert torch.equal(Steps(model).logprobs({1: ids}), wanted)


def test_calls_of_a_module_that_attends_more_than_once_begin_anew_with_a_forward() -> None:
    calls: Any = [lambda *_: "first", lambda *_: "second"]
    several, x = Several(calls), torch.empty(0)
    several(x, x, x)
    several.begin()
    assert [several(x, x, x), several(x, x, x)] == ["first", "second"]


# -- arguments of attention calls
# ----------------------------------------------------------------------------------------


def empty(kind: str) -> PreTrainedModel:
    """A tiny model of a type on the meta device."""
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes_of(kind)))


def test_a_model_that_never_attends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never calls attention through transformers' interface"):
        load(tiny_model("rwkv", sizes_of("rwkv")), tmp_path)


class Attends(torch.nn.Module):
    """Stands for a layer's attention; calls the attention function with arguments replaced by
    `change`."""

    def __init__(self, config: Any, change: Callable[[torch.Tensor], Mapping[str, Any]]) -> None:
        super().__init__()
        self._config, self._change = config, change

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        """Hidden states [1, T, 64], by four heads."""
        q = hidden_states.view(1, -1, 4, 16).transpose(1, 2)
        given = {"query": q, "key": q.clone(), "value": q, "attention_mask": attention_mask, **self._change(q)}
        ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation](self, **given)
        return hidden_states, None


def walked(change: Callable[[torch.Tensor], Mapping[str, Any]]) -> tuple[AttentionCall, ...]:
    """The attention calls of a Llama with a changed first layer."""
    model = empty("llama")
    model.model.layers[0].self_attn = Attends(model.config, change)
    return walk(model)


def test_without_a_scale_it_is_that_of_the_heads() -> None:
    assert walked(lambda q: {})[0].scaling == 0.25 and walked(lambda q: {"scaling": 0.5})[0].scaling == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q: {"position_bias": q}, "calls attention with position_bias"),
        (lambda q: {"attention_mask": None}, "makes its own masks"),
        (lambda q: {"key": torch.cat((q, q), dim=2)}, "to tokens outside the step"),
        (lambda q: {"scaling": 1 / q.shape[2]}, "differently with 256 tokens than with 3"),
    ],
)
def test_a_call_of_attention_of_another_kind_is_refused(change: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        walked(change)


@pytest.mark.parametrize(
    "error", [RuntimeError, NotImplementedError, AttributeError, TypeError, KeyError, IndexError, StopIteration]
)
def test_whatever_a_class_fails_with_on_shapes_alone_it_does_not_run(error: type[Exception]) -> None:
    """The model is then tried again with linear layers only, or refused in one line."""

    def fails(q: torch.Tensor) -> Mapping[str, Any]:
        raise error("lacks it")

    with pytest.raises(DoesNotRun, match=rf"does not run on shapes alone \({error.__name__}: "):
        walked(fails)


# -- windows
# --------------------------------------------------------------------------------------------------


def test_masks_tell_windows() -> None:
    assert window_of(lambda b, h, q, k: k <= q) is None
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 4096)) == 4096
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 1)) == 1


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: (k <= q) & (k // 64 == q // 64),
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)),
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k == 0)),
        lambda b, h, q, k: (k <= q + 1) & (k > q - 8),
        lambda b, h, q, k: (k <= q) & (k > q - 8) & (k != q - 6),
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: k < 0,
    ],
    ids=[
        "both ways",
        "chunks",
        "a window and the beginning",
        "a window and the first",
        "a window and the next",
        "a window with a gap",
        "not itself",
        "nothing",
    ],
)
def test_a_mask_of_another_kind_is_refused(mask: Any) -> None:
    with pytest.raises(ConfigError, match="mask of the model"):
        window_of(mask)
