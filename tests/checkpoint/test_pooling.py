"""The pooling and prompt settings in a checkpoint folder's files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.encoder_config import ENCODERS
from sglcore.checkpoint.model_config import read_config
from sglcore.checkpoint.pooling_config import MODES, Pooling, read_pooling, read_prompts
from sglcore.core.errors import ConfigError
from sglcore.models.architecture_registry import ARCHITECTURES

CLASSIFIER = "BertForSequenceClassification"
SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
}


def write(folder: Path, name: str, value: Any) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")


def modules(folder: Path, *kinds: str, pooling: Any = None) -> None:
    listed = [{"path": f"{place}_{kind}" if place else "", "type": f"a.b.{kind}"} for place, kind in enumerate(kinds)]
    write(folder, "modules.json", listed)
    if pooling is not None:
        write(folder, "1_Pooling/config.json", pooling)


@pytest.mark.parametrize(
    ("values", "modes"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode": "max", "pooling_mode_cls_token": True}, ("max",)),
        ({"pooling_mode": None, "pooling_mode_cls_token": True}, ("cls",)),
        *[({switch: True}, (mode,)) for mode, switch in MODES.items()],
    ],
)
def test_modes_are_those_of_new_and_old_files(tmp_path: Path, values: Any, modes: tuple[str, ...]) -> None:
    modules(tmp_path, "Transformer", "Pooling", pooling=values)
    found = read_pooling(tmp_path, "Qwen3ForCausalLM", {})
    assert found is not None and found.modes == modes and not found.is_normalized
    assert "1_Pooling/config.json" in found.reason
    assert read_pooling(tmp_path, "Qwen3ForCausalLM", {}, "generate") is None


SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The switches of older files by sentence-transformers, in the order in which it concatenates."""


def test_switches_are_those_of_sentence_transformers_in_its_order(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", pooling=dict.fromkeys(reversed(SWITCHES), True))
    found = read_pooling(tmp_path, "Qwen3ForCausalLM", {})
    assert found is not None and found.modes == tuple(SWITCHES.values())


def test_every_model_without_an_output_layer_makes_vectors(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        found = read_pooling(tmp_path, architecture, {})
        headless = architecture.endswith(("Model", "ForSequenceClassification")) or architecture in ENCODERS
        assert (found is not None) == headless, architecture
        if headless and not architecture.endswith("ForSequenceClassification"):
            assert found is not None and (found.modes, found.is_normalized, found.labels) == (
                ("mean" if architecture in ENCODERS else "lasttoken",),
                True,
                0,
            )
            assert found.reason.endswith("usual for encoders" if architecture in ENCODERS else "usual for decoders")


def test_files_as_sentence_transformers_writes_them_are_served(tmp_path: Path) -> None:
    """With every switch, and with settings that change nothing."""
    switches = {**dict.fromkeys(SWITCHES, False), "pooling_mode_cls_token": True}
    pooling = {"word_embedding_dimension": 8, **switches, "include_prompt": True}
    modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=pooling)
    for lowers in ({}, {"do_lower_case": False}, {"do_lower_case": None}):
        write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 512, **lowers})
        found = read_pooling(tmp_path, "BertModel", {})
        assert found is not None and (found.modes, found.is_normalized) == (("cls",), True)


def test_modules_lie_where_the_list_says(tmp_path: Path) -> None:
    listed = [{"path": "", "type": "a.Transformer"}, {"path": "other", "type": "a.Pooling"}]
    write(tmp_path, "modules.json", listed)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "max"})
    write(tmp_path, "other/config.json", {"pooling_mode": "cls"})
    found = read_pooling(tmp_path, "BertModel", {})
    assert found == Pooling(("cls",), reason="modules.json and other/config.json")
    write(tmp_path, "modules.json", [{**listed[0], "path": "0_Transformer"}, listed[1]])
    with pytest.raises(ConfigError, match="has its model in '0_Transformer'; move those files next to modules.json"):
        read_pooling(tmp_path, "BertModel", {})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "Identity: usual for its number of labels"),
        ({"num_labels": 1}, "Sigmoid: usual for its number of labels"),
        ({"num_labels": 0}, "Identity: usual for its number of labels"),
        ({"num_labels": 1, "id2label": {"0": "a", "1": "b"}}, "Identity: usual for its number of labels"),
        (
            {"sentence_transformers": {"version": "5"}, "sbert_ce_default_activation_function": "a.Sigmoid"},
            "Sigmoid: config.json",
        ),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "Identity"}, "Identity: config.json"),
        ({"sentence_transformers": {"activation_fn": "a.Sigmoid"}}, "Sigmoid: config.json"),
        (
            {
                "sentence_transformers": {"activation_fn": "a.Identity"},
                "sbert_ce_default_activation_function": "a.Sigmoid",
            },
            "Identity: config.json",
        ),
    ],
)
def test_the_function_after_scores_is_decided_with_its_reason(tmp_path: Path, raw: Any, said: str) -> None:
    found = read_pooling(tmp_path, CLASSIFIER, raw)
    assert found is not None and found.reason == f"the head of {CLASSIFIER}; {said}"
    assert found.is_sigmoid == said.startswith("Sigmoid")


def test_a_decoders_classifier_reads_the_last_token_whatever_the_file_says(tmp_path: Path) -> None:
    raw = {"classifier_pooling": "mean", "num_labels": 3}
    found = read_pooling(tmp_path, "Qwen3ForSequenceClassification", raw)
    assert found is not None and (found.modes, found.labels) == (("lasttoken",), 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("architecture", "task"), [("BertModel", "auto"), ("Qwen3ForCausalLM", "embed")])
def test_a_pooling_that_no_list_of_modules_names_is_taken_and_of_length_1(
    tmp_path: Path, mode: str, architecture: str, task: str
) -> None:
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": mode})
    found = read_pooling(tmp_path, architecture, {}, task)
    assert str(found) == f"{mode}, length 1" and found is not None and "there is no modules.json" in found.reason


@pytest.mark.parametrize("listed", [["a"], [1], [[]], [None], {"0": {}}, "a"])
def test_a_list_of_modules_of_something_else_is_one_line(tmp_path: Path, listed: Any) -> None:
    write(tmp_path, "modules.json", listed)
    with pytest.raises(ConfigError, match="modules.json is not a list of objects; wanted a JSON array"):
        read_pooling(tmp_path, "BertModel", {})


def test_a_module_that_normalises_is_the_last(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode": "lasttoken"})
    assert str(read_pooling(tmp_path, "BertModel", {})) == "lasttoken, length 1"


@pytest.mark.parametrize(
    ("kinds", "pooling", "named"),
    [
        (("Transformer", "Pooling", "Dense", "Normalize"), {}, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode": "median"}, "median"),
        (("Transformer", "Pooling"), {"include_prompt": False}, "include_prompt"),
        (("Transformer", "LogitScore"), {}, "LogitScore"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, kinds: tuple[str, ...], pooling: Any, named: str) -> None:
    modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(ConfigError, match=named):
        read_pooling(tmp_path, "BertModel", {})


def test_lower_case_that_the_tokenizer_does_not_make_is_refused(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", pooling={})
    write(tmp_path, "sentence_bert_config.json", {"do_lower_case": True})
    with pytest.raises(ConfigError, match="do_lower_case"):
        read_pooling(tmp_path, "BertModel", {})


@pytest.mark.parametrize(
    ("architecture", "task", "said"),
    [
        ("BertModel", "auto", "mean, length 1"),
        ("Qwen3Model", "auto", "lasttoken, length 1"),
        ("BertModel", "embed", "mean, length 1"),
        ("BertForMaskedLM", "embed", "mean, length 1"),
        ("Qwen3Model", "embed", "lasttoken, length 1"),
        ("Qwen3ForCausalLM", "embed", "lasttoken, length 1"),
        ("Qwen3ForCausalLM", "auto", "None"),
        ("Qwen3ForCausalLM", "generate", "None"),
        (CLASSIFIER, "embed", "cls, scores of 2 labels"),
        ("Qwen3ForSequenceClassification", "embed", "lasttoken, scores of 2 labels"),
    ],
)
def test_without_files_the_architecture_and_the_task_decide(
    tmp_path: Path, architecture: str, task: str, said: str
) -> None:
    assert str(read_pooling(tmp_path, architecture, {}, task)) == said
    write(tmp_path, "config.json", {**SIZES, "architectures": [architecture]})
    assert str(read_config(tmp_path, ARCHITECTURES, task).pooling) == said


@pytest.mark.parametrize(
    ("raw", "pooling"),
    [
        ({"id2label": {"0": "a"}}, Pooling(("cls",), labels=1, is_sigmoid=True)),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, Pooling(("cls",), labels=3)),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Identity"}, Pooling(("cls",), labels=1)),
        ({"sentence_transformers": {"activation_fn": "a.Sigmoid"}}, Pooling(("cls",), labels=2, is_sigmoid=True)),
        ({"classifier_pooling": "mean"}, Pooling(("mean",), labels=2)),
    ],
)
def test_a_classifier_has_scores(tmp_path: Path, raw: Any, pooling: Pooling) -> None:
    found = read_pooling(tmp_path, CLASSIFIER, raw)
    assert found is not None
    assert (found.modes, found.labels, found.is_sigmoid) == (pooling.modes, pooling.labels, pooling.is_sigmoid)


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        (Pooling(("mean",)), "mean"),
        (Pooling(("cls", "max"), is_normalized=True), "cls+max, length 1"),
        (Pooling(("cls",), labels=1, is_sigmoid=True), "cls, a score, sigmoid"),
        (Pooling(("cls",), labels=2), "cls, scores of 2 labels"),
        (Pooling(("lasttoken",), labels=2, is_sigmoid=True), "lasttoken, scores of 2 labels, sigmoid"),
    ],
)
def test_a_pooling_has_words(pooling: Pooling, said: str) -> None:
    assert str(pooling) == said


@pytest.mark.parametrize(
    ("architecture", "task"),
    [("BertModel", "generate"), (CLASSIFIER, "generate"), ("Qwen3ForSequenceClassification", "generate")],
)
def test_a_task_that_is_not_the_checkpoints_is_refused(tmp_path: Path, architecture: str, task: str) -> None:
    with pytest.raises(ConfigError, match=r"task"):
        read_pooling(tmp_path, architecture, {}, task)


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Softmax"):
        read_pooling(tmp_path, CLASSIFIER, {"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}})


ODD = (None, True, 0, 2.5, "x", [], ["a"], [["mean"]], [None], {}, {"a": 1})
FILES = {
    "1_Pooling/config.json": ("pooling_mode", "include_prompt", "pooling_mode_mean_tokens"),
    "config_sentence_transformers.json": ("prompts", "default_prompt_name"),
    "sentence_bert_config.json": ("do_lower_case",),
}


@pytest.mark.parametrize("name", FILES)
def test_a_value_of_another_kind_is_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    for key, value in itertools.product(FILES[name], ODD):
        modules(tmp_path, "Transformer", "Pooling", pooling={})
        write(tmp_path, name, {key: value})
        try:
            found, prompts = read_pooling(tmp_path, "BertModel", {}), read_prompts(tmp_path)
            assert found is not None and set(found.modes) <= MODES.keys(), (key, value)
            assert all(isinstance(each, str) for each in prompts.texts.values()), (key, value)
            assert prompts.default is None or prompts.default in prompts.texts, (key, value)
        except ConfigError as error:
            assert "\n" not in str(error), (key, value)


def test_prompts_are_texts_by_name_with_a_default(tmp_path: Path) -> None:
    assert read_prompts(tmp_path).texts == {} and read_prompts(tmp_path).default is None
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    found = read_prompts(tmp_path)
    assert found.texts == {"query": "q: "} and found.default == "query"
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"})
    with pytest.raises(ConfigError, match="default_prompt_name"):
        read_prompts(tmp_path)


def test_a_classifier_has_scores_whatever_modules_the_folder_lists(tmp_path: Path) -> None:
    modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": "max"})
    found = read_pooling(tmp_path, CLASSIFIER, {"num_labels": 3})
    assert found is not None and (found.modes, found.labels) == (("cls",), 3)


@pytest.mark.parametrize("architecture", ["LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "BertForMaskedLM"])
def test_a_model_without_an_output_layer_generates_no_text(tmp_path: Path, architecture: str) -> None:
    found = read_pooling(tmp_path, architecture, {})
    assert found is not None and found.is_normalized
    with pytest.raises(ConfigError, match=f"{architecture} has no output layer for text; leave --task out"):
        read_pooling(tmp_path, architecture, {}, "generate")


def test_labels_are_those_that_have_names(tmp_path: Path) -> None:
    for raw, count in (
        ({"num_labels": 5, "id2label": {"0": "a", "1": "b"}}, 2),
        ({"num_labels": 5, "id2label": {}}, 5),
        ({"id2label": None}, 2),
    ):
        found = read_pooling(tmp_path, CLASSIFIER, raw)
        assert found is not None and found.labels == count


def test_a_default_prompt_is_one_of_the_files(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "q: ", "document": "d: "}}
    for default in ("query", "document", None):
        write(tmp_path, "config_sentence_transformers.json", {**prompts, "default_prompt_name": default})
        assert read_prompts(tmp_path).default == default
    write(tmp_path, "config_sentence_transformers.json", {**prompts, "default_prompt_name": "title"})
    with pytest.raises(ConfigError, match="default_prompt_name 'title'; wanted one of query, document"):
        read_prompts(tmp_path)


def test_null_for_settings_of_sentence_transformers_is_as_if_they_were_not_there(tmp_path: Path) -> None:
    given = {"num_labels": 1, "sentence_transformers": None, "sbert_ce_default_activation_function": None}
    assert read_pooling(tmp_path, CLASSIFIER, given) == read_pooling(tmp_path, CLASSIFIER, {"num_labels": 1})
    write(tmp_path, "config_sentence_transformers.json", {"prompts": None, "default_prompt_name": None})
    found = read_prompts(tmp_path)
    assert (found.texts, found.default) == ({}, None)
