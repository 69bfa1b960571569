"""Types of transformers that were never compared, and checkpoints with their own code: compared at
load, or refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from sglcore.core.errors import ConfigError, StrictError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.implementation import choose_implementation
from sglcore.models.single_steps import Steps
from sglcore.models.transformers_backend import equivalence_check
from sglcore.models.transformers_backend.equivalence_check import whole
from sglcore.models.transformers_backend.small_config import PARAMETERS, shrunk
from sglcore.models.transformers_backend.stateful_layers import find_mixers
from sglcore.models.transformers_backend.transformers_config import Library, transformers_config
from sglcore.models.transformers_backend.verified_types import PROVEN
from tests.checkpoints import SIZES, llama, save
from tests.laws.engine import TokenEngine, check_logprobs
from tests.models.steps import load
from tests.models.transformers_cases import sizes_of, tiny_model

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELING = """
import torch
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
from .positions_own import FIRST

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.places = torch.nn.Embedding(128, config.hidden_size)
        self.model.register_forward_pre_hook(self._place, with_kwargs=True)

    @staticmethod
    def _place(model, args, given):
        ids, places = given.pop("input_ids", None), given.get("position_ids")
        embeds = given["inputs_embeds"] if ids is None else model.embed_tokens(ids)
        if places is None or FIRST is None:
            places = (FIRST or 0) + torch.arange(embeds.shape[1], device=embeds.device)[None]
        return args, {**given, "inputs_embeds": embeds + model.places(places)}
"""
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture(autouse=True, scope="module")
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache folder for checkpoints' code, and unload its modules afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME]:
        del sys.modules[name]


def own_model(folder: Path, first: int | None = 0) -> Path:
    """A checkpoint with its own code: a Llama with additional learned positions that count from
    `first`. None: they count from 0 in each step, whatever positions are passed."""
    folder.mkdir()
    files = {
        "configuration_own.py": CONFIGURATION,
        "modeling_own.py": MODELING,
        "positions_own.py": f"FIRST = {first}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    raw = {**SIZES, "model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def chosen(folder: Path, asked: str = "transformers", strict: bool = False, **given: Any) -> dict[str, Row]:
    """The ledger's rows by topic."""
    ledger = DecisionLedger(strict=strict)
    choose_implementation(asked, folder, ledger, **given)
    return {row.topic: row for row in ledger.rows}


# -- types of transformers
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def unproven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama checkpoint, with its type removed from the compared ones."""
    monkeypatch.setattr("sglcore.models.implementation.PROVEN", PROVEN - {"llama"})
    return save(llama(), tmp_path / "model")


def test_a_type_that_was_not_compared_is_compared_at_load_where_it_is_asked_for(unproven: Path) -> None:
    row = chosen(unproven)["model impl"]
    assert row.effective == "transformers" and row.downgrade
    assert "LlamaForCausalLM was not compared before; checked at load" in row.reason and "at most " in row.reason


def test_strict_refuses_it(unproven: Path) -> None:
    with pytest.raises(
        StrictError, match=r"model impl: found transformers \(requested; LlamaForCausalLM was not compared"
    ):
        chosen(unproven, strict=True)


def test_random_numbers_of_the_process_go_on_as_if_nothing_was_compared(unproven: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    chosen(unproven)
    torch.testing.assert_close(torch.rand(2), wanted)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.RobertaConfig(**SIZES, is_decoder=True), "'roberta' cannot be served: .* differ by [1-9]"),
        (transformers.BertConfig(**{**SIZES, "max_position_embeddings": 300}), "'bert' cannot be served: a mask"),
        (
            transformers.XLMConfig(emb_dim=48, n_layers=2, n_heads=4, vocab_size=97),
            "'xlm' .* does not run on shapes alone",
        ),
    ],
    ids=["positions from another place", "an encoder", "what can not be tried"],
)
def test_what_is_not_equal_is_refused_by_its_type(config: Any, words: str, tmp_path: Path) -> None:
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ConfigError, match=words):
        chosen(folder)


def test_a_class_that_fails_is_refused_with_what_it_says(unproven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise IndexError("no place\nfor it")

    monkeypatch.setattr(equivalence_check, "difference", fails)
    with pytest.raises(ConfigError, match=r"'llama' cannot be served: .*\(IndexError: no place for it\)"):
        chosen(unproven)


@pytest.mark.parametrize("length", [equivalence_check.LENGTH, equivalence_check.OTHER])
def test_what_is_no_number_in_either_request_is_refused(
    unproven: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return whole(model, tokens) * (float("nan") if len(tokens) == length else 1)

    monkeypatch.setattr(equivalence_check, "whole", spoiled)
    with pytest.raises(ConfigError, match="'llama' cannot be served: .* differ by nan"):
        chosen(unproven)


@pytest.mark.parametrize(("off", "is_served"), [(1e-4, True), (1e-3, False)])
def test_a_thousandth_of_a_log_probability_is_not_equal(
    unproven: Path, off: float, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equivalence_check, "whole", lambda model, tokens: whole(model, tokens) + off)
    if is_served:
        assert chosen(unproven)["model impl"].downgrade
        return
    with pytest.raises(ConfigError, match="'llama' cannot be served: .* differ by 0.001"):
        chosen(unproven)


# -- small configurations
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("llama", {"num_key_value_heads": 4}),
        ("gemma3_text", {"final_logit_softcapping": None, "sliding_window": 6}),
        ("deepseek_v3", {"n_group": 8, "num_experts_per_tok": 8, "n_routed_experts": 16}),
        ("qwen3_next", {"num_key_value_heads": 2}),
        ("seed_oss", {"num_attention_heads": 5, "num_key_value_heads": 1}),
        ("mamba2", {"n_groups": 8, "num_heads": 8}),
        ("bamba", {"mamba_n_groups": 1}),
    ],
)
def test_a_small_model_has_every_kind_of_layer_of_the_whole_one(kind: str, kept: dict[str, Any]) -> None:
    library = Library(CONFIG_MAPPING[kind]())
    small = shrunk(library)
    assert {name: small.config.to_dict()[name] for name in kept} == kept
    kinds = [set(each.config.to_dict().get("layer_types") or ()) for each in (library, small)]
    assert kinds[0] == kinds[1]
    with torch.device("meta"):
        assert sum(each.numel() for each in small.model().parameters()) < PARAMETERS
    assert shrunk(Library(llama().config)).config.hidden_size == SIZES["hidden_size"]


def test_what_a_configuration_has_none_of_a_small_one_has_none_of() -> None:
    """A configured 0 is not a size to be changed: it says that a Granite 4 has no experts."""
    kind: Any = CONFIG_MAPPING["granitemoehybrid"]
    dense = Library(kind(num_local_experts=0))
    small = shrunk(dense).config
    assert small.num_local_experts == 0 and small.hidden_size < dense.config.hidden_size


def test_tokens_with_a_meaning_are_among_the_few_words() -> None:
    """Special tokens have ids far above the small vocabulary; an embedding refuses a padding id
    outside it."""
    small = shrunk(Library(transformers.LlamaConfig(vocab_size=128256, pad_token_id=128004))).config
    assert small.pad_token_id < small.vocab_size == 512


def test_what_is_said_of_single_layers_is_cut_with_them() -> None:
    """Settings per layer: by index in a list, or by number in a mapping."""
    small = shrunk(Library(CONFIG_MAPPING["gemma4_text"]())).config
    assert len(small.layer_types) == small.num_hidden_layers < 30
    assert all(int(layer) < small.num_hidden_layers for layer in small.to_dict()["per_layer_config"])


# -- what the comparison runs
# ------------------------------------------------------------------------------------------


def test_two_requests_are_compared_in_chunks_side_by_side_and_then_token_by_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a model that mixes the requests of a step, or that is wrong in steps of one token,
    would be served."""
    seen: list[dict[int, int]] = []
    real = Steps.hidden

    def hidden(self: Steps, tokens: Mapping[int, Sequence[int]], *more: Any) -> torch.Tensor:
        seen.append({slot: len(part) for slot, part in tokens.items()})
        return real(self, tokens, *more)

    monkeypatch.setattr(Steps, "hidden", hidden)
    oracle = llama()
    loaded = load(save(oracle, tmp_path))
    assert equivalence_check.difference(oracle, loaded) <= equivalence_check.EQUAL
    single = [step for step in seen if set(step.values()) == {1}]
    chunks = [step for step in seen if step not in single]
    lengths = {1: equivalence_check.LENGTH, 2: equivalence_check.OTHER}
    assert {slot: sum(step.get(slot, 0) for step in seen) for slot in lengths} == lengths
    assert any(len(step) == 2 and min(step.values()) > 1 for step in chunks)
    for slot, length in lengths.items():
        assert sum(slot in step for step in single) >= length - length // 2
    assert sum(len(step) == 2 for step in single) >= equivalence_check.OTHER // 2


@pytest.mark.parametrize("kind", ["mamba2", "falcon_mamba", "qwen3_next"])
def test_a_model_goes_on_from_its_own_cache_by_whatever_name_it_has(kind: str) -> None:
    """Against the same model in one forward: nothing of the previous tokens is lost."""
    model, tokens = tiny_model(kind, sizes_of(kind)), torch.arange(3, 15)
    torch.testing.assert_close(equivalence_check._cached(model, tokens), whole(model, tokens), rtol=0, atol=1e-3)


# -- code in a checkpoint
# ----------------------------------------------------------------------------------------------


def test_code_is_not_run_and_the_refusal_names_it_and_the_flag(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    for asked in ("auto", "transformers"):
        with pytest.raises(ConfigError, match=r"configuration_own.py, modeling_own.py, .* --trust-remote-code"):
            chosen(folder, asked)


def test_trusted_code_runs_once_it_is_shown_to_give_the_same(tmp_path: Path) -> None:
    rows = chosen(own_model(tmp_path / "model"), "auto", trusts_code=True)
    assert rows["remote code"].effective == "configuration_own.py, modeling_own.py, positions_own.py"
    assert rows["remote code"].downgrade and rows["model impl"].downgrade
    assert "OwnForCausalLM was not compared before; checked at load" in rows["model impl"].reason


def test_an_architecture_of_its_own_is_that_of_the_code_whatever_its_type(tmp_path: Path) -> None:
    """A compared type does not cover a class that transformers does not have."""
    folder = own_model(tmp_path / "model")
    changed = {**json.loads((folder / "config.json").read_text()), "model_type": "exaone4"}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="'OwnForCausalLM' brings code of its own"):
        chosen(folder)
    assert chosen(folder, trusts_code=True)["model impl"].downgrade


def test_strict_refuses_code_before_it_runs(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    with pytest.raises(StrictError, match=r"remote code: found .*; wanted none"):
        chosen(folder, strict=True, trusts_code=True)


@pytest.mark.parametrize("first", [2, None], ids=["from elsewhere", "in each step from 0"])
def test_positions_that_count_otherwise_are_found(first: int | None, tmp_path: Path) -> None:
    """As with RoBERTa's positions: log-probabilities are far off without any error."""
    with pytest.raises(ConfigError, match=r"'own' cannot be served: .* differ by [0-9.]+ "):
        chosen(own_model(tmp_path / "model", first), trusts_code=True)


def test_a_checkpoint_with_code_is_served(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    oracle = equivalence_check.random_model(transformers_config(folder, runs_code=True).library)
    oracle.save_pretrained(folder)
    engine = TokenEngine(folder, trust_remote_code=True)
    check_logprobs(engine.run([[5, 9, 7, 11, 3], [4, 8]], 6), oracle)


def test_layers_with_states_in_it_are_found() -> None:
    """If they keep their states in transformers' cache."""

    def forward(self: Any, hidden: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        return cache_params.update_recurrent_state(hidden, 0)

    body = {"__module__": f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.own.modeling_own", "forward": forward}
    model: Any = torch.nn.Sequential(type("Own", (torch.nn.Module,), body)())
    assert [mixer.module for mixer in find_mixers(model)] == [model[0]]


def without(name: str) -> Callable[[Path], None]:
    """A folder in which a file is missing."""
    return lambda folder: (folder / name).unlink()


def mapped(**changes: str) -> Callable[[Path], None]:
    """A folder with other class names in the configuration's `auto_map`."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "auto_map": changes}))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("positions_own.py"), "positions_own.py is not there"),
        (without("modeling_own.py"), "modeling_own.py is not there"),
        (mapped(AutoModel="modeling_own.OwnModel"), "for AutoModel; wanted a class for AutoModelForCausalLM"),
        (mapped(AutoModelForCausalLM="a/b--modeling_own.Own"), "code of another repository.* write 'modeling_own.Own'"),
        (mapped(**{**AUTO_MAP, "AutoModelForCausalLM": "modeling_own.Other"}), "OwnForCausalLM.* is Other"),
    ],
)
def test_code_that_is_not_there_is_one_line(change: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    change(folder)
    with pytest.raises(ConfigError, match=words):
        chosen(folder, trusts_code=True)
