"""Draft models against dense torch around transformers' own layers, in float32."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.models.drafts.draft_config import kind_of, offered_head
from sglcore.models.drafts.draft_loader import Draft, load_draft
from sglcore.runtime.kernels.table import KernelTable
from sglcore.worker.schedule_batch import ForwardMode
from tests.checkpoints import glm4_moe, llama, qwen2, qwen3_next, save
from tests.drafts import TARGET, by_speculators, eagle, eagle3, next_token, renamed, with_config
from tests.latent import deepseek_v3, deepseek_v32, glm_moe_dsa
from tests.models.steps import FACTS, Steps, load

PROMPT, DRAFTS = 9, 3
TOLERANCE = 5e-5


def loaded(target: Any, folder: Path, kind: str) -> Draft:
    """The draft model, loaded by the engine's loader."""
    given = {"facts": FACTS, "kernels": KernelTable(), "ledger": DecisionLedger(), "progress": lambda *_: None}
    return load_draft(EngineConfig(dtype="float32"), folder, kind, target, **given)


def proposed(model: Any, following: list[int], features: Tensor, path: list[int], pieces: tuple[int, ...]) -> Tensor:
    """Log-probabilities after the prompt's last token and after each token of a path, through
    runner and pages."""
    steps, rows, found = Steps(model), model.project(features), []

    def run(ids: list[int], given: Tensor, mode: ForwardMode) -> Tensor:
        if mode.is_decode:
            steps.runner.token_table.last[1] = ids[0]
        batch = steps.staged({1: ids}, mode)
        batch.features = given
        before = given.clone()
        hidden = steps.runner.run_eager(batch)
        assert torch.equal(before, given), "the batch's features are not the model's"
        return hidden

    with torch.inference_mode():
        for part, ids in zip(rows.split(pieces), torch.tensor(following).split(pieces), strict=True):
            recurrent = run(ids.tolist(), part, ForwardMode.EXTEND)[-1:]
        for token in (*path, None):
            found.append(torch.log_softmax(model.logits(recurrent), -1)[0])
            if token is not None:
                recurrent = run([token], recurrent, ForwardMode.DECODE)
    return torch.stack(found)


CASES: dict[str, Any] = {
    "eagle": (eagle, {}),
    "eagle-two-layers": (eagle, {"num_hidden_layers": 2}),
    "eagle-without-bias": (eagle, {"has_bias": False}),
    "eagle-biased-heads": (eagle, {"has_qkv_bias": True}),
    "eagle3": (eagle3, {}),
    "eagle3-biased-heads": (eagle3, {"attention_bias": True}),
    "eagle3-two-layers": (eagle3, {"num_hidden_layers": 2}),
    "eagle3-normed": (eagle3, {"norm_output": True, "has_fc_norm": True}),
    "eagle3-target's-head": (eagle3, {"rows": 0}),
    "eagle3-residual-normed": (eagle3, {"norm_before_residual": True}),
    "eagle3-all-normed": (eagle3, {"norm_before_fc": True}),
}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of log-probabilities; both have -inf in the same places."""
    assert torch.equal(found.isinf(), wanted.isinf())
    return float((found - wanted).nan_to_num().abs().max())


def check(model: Any, dense: Any, width: int, pieces: tuple[int, ...]) -> None:
    """Compare the draft model with the dense one after a prompt in chunks of sizes `pieces`, and
    along a path."""
    torch.manual_seed(2)
    vocab = dense.target.config.vocab_size
    ids, path = (torch.randint(1, vocab, (count,)).tolist() for count in (PROMPT, DRAFTS))
    features = torch.randn(PROMPT, width)
    wanted = dense.propose(ids, features, path)
    assert distance(proposed(model, ids, features, path, pieces), wanted) < TOLERANCE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A Llama of six layers, by transformers and by the engine."""
    oracle = llama(**TARGET)
    return oracle, load(save(oracle, tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize("pieces", [(PROMPT,), (4, 1, 4)], ids=["whole", "pieces"])
@pytest.mark.parametrize("case", CASES)
def test_eagle_proposes_as_dense_torch_does(target, case: str, pieces: tuple[int, ...], tmp_path: Path) -> None:
    oracle, model = target
    make, options = CASES[case]
    dense = make(oracle, tmp_path, **options)
    kind = make.__name__
    assert kind_of(tmp_path) == kind
    draft = loaded(model, tmp_path, kind)
    assert draft.aux_layers == ((1, 3, 5) if kind == "eagle3" else ())
    check(draft.model, dense, oracle.config.hidden_size * (3 if kind == "eagle3" else 1), pieces)


def test_norms_of_older_files_are_those_before_the_projection(target, tmp_path: Path) -> None:
    oracle, model = target
    dense = eagle3(oracle, tmp_path, has_fc_norm=True)
    for place, name in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        renamed(tmp_path, f"fc_norm.{place}.", f"{name}.")
    check(loaded(model, tmp_path, "eagle3").model, dense, 144, (PROMPT,))
    for old, new in (("_low", "_other"), ("_high", "_low"), ("_other", "_high")):
        renamed(tmp_path, f"aux_norm{old}", f"aux_norm{new}")
    with pytest.raises(AssertionError):
        check(loaded(model, tmp_path, "eagle3").model, dense, 144, (PROMPT,))


def test_the_layers_that_a_draft_reads_where_it_does_not_say(target, tmp_path: Path) -> None:
    """By default: before the third layer, before the middle one, and before the last but two. With
    six layers, two of these are the same."""
    eagle3(target[0], tmp_path)
    with_config(tmp_path, eagle_config=None)
    assert loaded(target[1], tmp_path, "eagle3").aux_layers == (2, 3, 3)


@pytest.mark.parametrize("written", [True, False])
def test_a_draft_by_the_library_speculators_is_one(target, written: bool, tmp_path: Path) -> None:
    """Without `norm_before_residual` in the configuration, the residual is normed."""
    oracle, model = target
    dense = eagle3(oracle, tmp_path, norm_before_fc=True, norm_before_residual=True)
    by_speculators(tmp_path)
    if not written:
        with_config(tmp_path, norm_before_residual=None)
    assert kind_of(tmp_path) == "eagle3"
    draft = loaded(model, tmp_path, "eagle3")
    assert draft.aux_layers == (1, 3, 5)
    check(draft.model, dense, 144, (4, 1, 4))
    with_config(tmp_path, norm_before_residual=False)
    with pytest.raises(AssertionError):
        check(loaded(model, tmp_path, "eagle3").model, dense, 144, (PROMPT,))


def test_a_list_of_frequent_tokens_takes_nothing_from_a_draft(target, tmp_path: Path) -> None:
    oracle, model = target
    dense = eagle(oracle, tmp_path)
    with_config(tmp_path, hot_vocab_size=32)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.randn(32, 48)}, file)
    check(loaded(model, tmp_path, "eagle").model, dense, 48, (PROMPT,))


WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
ONE: dict[str, Any] = {
    "llama": (llama, "deepseek", {}),
    "qwen3-next": (qwen3_next, "qwen", {"layer_types": ["full_attention"], "mlp_only_layers": []}),
    "glm4-moe": (glm4_moe, "deepseek", {"first_k_dense_replace": 0}),
    "deepseek-v3.2": (deepseek_v32, "deepseek", {"first_k_dense_replace": 0}),
    "glm-moe-dsa": (glm_moe_dsa, "deepseek", {"indexer_types": ["full"], "mlp_layer_types": ["sparse"]}),
    "mimo": (qwen2, "mimo", {}),
    "mimo-window": (partial(qwen2, **WINDOW, max_window_layers=1), "mimo", {"max_window_layers": 0}),
    "deepseek-v3": (deepseek_v3, "deepseek", {"first_k_dense_replace": 0}),
}


@pytest.mark.parametrize("case", ONE)
def test_the_layer_behind_the_last_proposes_as_dense_torch_does(case: str, tmp_path: Path) -> None:
    make, names, one = ONE[case]
    oracle = make()
    dense = next_token(oracle, tmp_path, make, names, **one)
    assert offered_head(tmp_path) == kind_of(tmp_path) == "mtp"
    draft = loaded(load(tmp_path), tmp_path, "mtp")
    assert draft.aux_layers == () and len(draft.model.attention_layers) == 1
    check(draft.model, dense, oracle.config.hidden_size, (4, 1, 4))


def test_a_draft_lies_beside_its_target_or_comes_alone(target, tmp_path: Path) -> None:
    oracle, _ = target
    save(oracle, tmp_path)
    assert offered_head(tmp_path) is None
    dense = eagle3(oracle, tmp_path / "draft")
    assert offered_head(tmp_path) == "eagle3"
    check(loaded(load(tmp_path), tmp_path, "eagle3").model, dense, 144, (PROMPT,))
    with_config(tmp_path / "draft", speculators_model_type="dflash")
    assert offered_head(tmp_path) is None


def test_nothing_of_the_target_is_there_twice(target, tmp_path: Path) -> None:
    oracle, model = target
    eagle(oracle, tmp_path)
    file = tmp_path / "model.safetensors"
    copies = {"embed_tokens.weight": oracle.model.embed_tokens.weight, "lm_head.weight": oracle.lm_head.weight}
    save_file({**load_file(file), **{name: each.detach().clone() for name, each in copies.items()}}, file)
    draft = loaded(model, tmp_path, "eagle").model
    assert all(97 not in each.shape for each in draft.weights.parameters)


def test_a_draft_of_another_width_has_an_embedding_of_its_own(target, tmp_path: Path) -> None:
    oracle, model = target
    dense = eagle3(oracle, tmp_path, hidden_size=40)
    own = torch.nn.Embedding(97, 40)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "embed_tokens.weight": own.weight.detach()}, file)
    with_config(tmp_path, target_hidden_size=48)
    dense.__dict__["target"] = type(
        "Own", (), {"model": type("Model", (), {"embed_tokens": own}), "config": oracle.config}
    )
    check(loaded(model, tmp_path, "eagle3").model, dense, 144, (PROMPT,))


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_what_a_configuration_ties_changes_no_draft(target, make: Any, tmp_path: Path) -> None:
    """With an output layer of the draft's own and no token map (eagle3), and with the target's."""
    oracle, model = target
    dense = make(oracle, tmp_path, **({"rows": 97} if make is eagle3 else {}))
    with_config(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name not in ("d2t", "t2d")}, file)
    kind = make.__name__
    check(loaded(model, tmp_path, kind).model, dense, 144 if kind == "eagle3" else 48, (PROMPT,))


def test_any_model_over_the_same_tokens_is_a_draft(target, tmp_path: Path) -> None:
    _, model = target
    save(llama(num_hidden_layers=1, hidden_size=32), tmp_path)
    draft = loaded(model, tmp_path, "standalone")
    assert draft.aux_layers is None and draft.model.config.hidden_size == 32


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "eagle"}, "has a draft of kind 'eagle3'; wanted .eagle.*--speculative eagle3"),
    "vocabulary": ({"vocab_size": 98}, "vocab_size = 98; wanted 97"),
    "width": ({"hidden_size": 64}, "target_hidden_size = 64; wanted 48"),
    "target's width": ({"target_hidden_size": 64}, "target_hidden_size = 64; wanted 48"),
    "own vocabulary": ({"draft_vocab_size": 99}, "draft_vocab_size = 99; wanted 97 at most"),
    "other vocabulary": ({"draft_vocab_size": 39}, r"lm_head.weight.* has the shape \[40, 48\]; wanted \[39, 48\]"),
    "no head": ({"without": "lm_head.weight"}, "draft_vocab_size = 40, and its files have no lm_head.weight; wanted"),
    "no map": ({"without": "d2t"}, "draft_vocab_size = 40, and its files have no d2t; wanted d2t, or 97"),
    "no norm": (
        {"norm_before_fc": True, "eagle_config": None},
        "norm_before_fc = True, and its files have no input_norm",
    ),
    "nvidia's": ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc = True, and its files have no input_norm"),
    "a word": ({"norm_before_residual": "yes"}, "norm_before_residual = 'yes'; wanted true or false"),
    "no layers": ({"ids": []}, r"eagle_aux_hidden_state_layer_ids = \[\]; wanted ascending numbers"),
    "layers": ({"ids": [0, 2, 6]}, r"eagle_aux_hidden_state_layer_ids = \[0, 2, 6\]; wanted .* 6 layers"),
    "fewer layers": (
        {"ids": [0, 2]},
        "eagle_aux_hidden_state_layer_ids = .*wanted 3 layers, because fc.weight has 144",
    ),
    "other library": ({"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash'; wanted 'eagle3'"),
    "other layer": (
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "qwen3"}},
        "transformer_layer_config.model_type = 'qwen3'; wanted 'llama'",
    ),
    "norms of heads": ({"add": "midlayer.self_attn.q_norm.weight"}, "has .midlayer.self_attn.q_norm.weight., which"),
    "parallel": ({"add": "mask_hidden"}, "has .mask_hidden., which"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said_before_weights_are_read(target, case: str, tmp_path: Path) -> None:
    words, message = WRONG[case]
    eagle3(target[0], tmp_path)
    kind, ids, file = words.get("kind", "eagle3"), words.get("ids"), tmp_path / "model.safetensors"
    changes = {name: value for name, value in words.items() if name not in ("kind", "ids", "without", "add")}
    own = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    with_config(tmp_path, **changes, **own)
    stored = {name: value for name, value in load_file(file).items() if name != words.get("without")}
    save_file({**stored, **({words["add"]: torch.ones(4)} if "add" in words else {})}, file)
    with pytest.raises((ConfigError, CheckpointError), match=message) as raised:
        loaded(target[1], tmp_path, kind)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", [96, -3])
def test_a_map_to_tokens_that_there_are_not_is_refused(target, wrong: int, tmp_path: Path) -> None:
    eagle3(target[0], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored["d2t"][2] = wrong
    save_file(stored, file)
    with pytest.raises(CheckpointError, match="d2t has numbers from"):
        loaded(target[1], tmp_path, "eagle3")


def test_a_draft_of_other_tokens_is_refused(target, tmp_path: Path) -> None:
    oracle, _ = target
    for name, vocab in (("target", {"a": 0, "b": 1}), ("draft", {"b": 0, "a": 1})):
        save(oracle, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    with pytest.raises(ConfigError, match="other token ids than the model; wanted the same ids"):
        loaded(load(tmp_path / "target"), tmp_path / "draft", "standalone")
