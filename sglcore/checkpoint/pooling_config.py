"""How a checkpoint for embeddings or scores reduces its hidden states: to one vector, by the files
of sentence-transformers, or to the scores of a classification head. Also the prompts that such
files name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.checkpoint_files import read_json, read_list
from sglcore.checkpoint.encoder_config import CLASSIFIER, ENCODERS
from sglcore.core.errors import ConfigError

MODULES = "modules.json"
POOLING = "1_Pooling"
"""The folder of the pooling if no list of modules names one."""
PROMPTS = "config_sentence_transformers.json"

MODES: Mapping[str, str] = MappingProxyType(
    {
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
        "mean": "pooling_mode_mean_tokens",
        "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
)
"""The ways to reduce many vectors to one, in the order in which several are concatenated, with
their switches in old files."""

HEADLESS = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
"""Decoders that were saved without their output layer."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states of a request become its vector or its scores: the results of `modes` of
    `MODES`, concatenated; then a head with `labels` labels (0: no head), followed by a sigmoid if
    `is_sigmoid`; without a head the vector itself, scaled to length 1 if `is_normalized`. `reason`:
    the source of the decision, for the ledger."""

    modes: tuple[str, ...]
    is_normalized: bool = False
    labels: int = 0
    is_sigmoid: bool = False
    reason: str = ""

    def __str__(self) -> str:
        parts = ["+".join(self.modes)]
        if self.labels:
            parts.append(f"scores of {self.labels} labels" if self.labels > 1 else "a score")
        parts += ["sigmoid"] if self.is_sigmoid else []
        parts += ["length 1"] if self.is_normalized else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are put before a text to embed, by name, and the name of the default prompt
    (None: there is none).
    """

    texts: Mapping[str, str]
    default: str | None


def read_pooling(folder: Path, architecture: str, raw: Mapping[str, Any], task: str = "auto") -> Pooling | None:
    """Return how a checkpoint's hidden states become vectors, or None for a checkpoint that
    generates text. With `task` "auto" the checkpoint decides: encoders, classifiers and checkpoints
    with sentence-transformers' files have vectors. `raw` is `config.json`.

    Raises `ConfigError` for a task that does not fit the checkpoint, and for unsupported modules.
    """
    is_encoder, is_classifier = architecture in ENCODERS, architecture.endswith(CLASSIFIER)
    headless = is_encoder or architecture in HEADLESS
    if task == "generate":
        if headless or is_classifier:
            raise ConfigError(f"{architecture} has no output layer for text", remedy="leave --task out")
        return None
    if is_classifier:
        return _classifier(architecture, raw)
    if (folder / MODULES).is_file():
        return _of_modules(folder)
    if not headless and task == "auto":
        return None
    if (folder / POOLING / "config.json").is_file():
        return Pooling(_modes(folder / POOLING), True, reason=f"{POOLING}/config.json; there is no {MODULES}")
    mode = "mean" if is_encoder else "lasttoken"
    kind = "encoders" if is_encoder else "decoders"
    return Pooling((mode,), is_normalized=True, reason=f"there is no {MODULES}, and this is usual for {kind}")


def read_prompts(folder: Path) -> Prompts:
    """Return the prompts of a checkpoint folder; empty if it names none. Raises `ConfigError` for a
    damaged file, and for a default prompt that is not among them.
    """
    if not (folder / PROMPTS).is_file():
        return Prompts(MappingProxyType({}), None)
    found = read_json(folder / PROMPTS)
    texts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise ConfigError(f"{folder / PROMPTS} has prompts = {texts!r:.60}", wanted="a JSON object of texts")
    if isinstance(default, list | dict):
        raise ConfigError(f"{folder / PROMPTS} has default_prompt_name = {default!r:.60}", wanted="a text")
    if default is not None and default not in texts:
        raise ConfigError(
            f"{folder / PROMPTS} has default_prompt_name {default!r}",
            wanted=f"one of {', '.join(texts) or 'its prompts'}",
        )
    return Prompts(MappingProxyType(dict(texts)), default)


def _classifier(architecture: str, raw: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a sequence classification head: the architecture decides the token that
    it reads; the last function is the one that sentence-transformers wrote, or by default a sigmoid
    for a single label. Raises `ConfigError` for another function."""
    count = raw.get("num_labels")
    labels = len(raw.get("id2label") or ()) or (2 if count is None else count)
    mode = raw.get("classifier_pooling", "cls") if architecture in ENCODERS else "lasttoken"
    if mode not in MODES:
        raise ConfigError(f"config.json has classifier_pooling = {mode!r}", wanted="cls or mean")
    named = (raw.get("sentence_transformers") or {}).get(
        "activation_fn", raw.get("sbert_ce_default_activation_function")
    )
    activation = (named or ("Sigmoid" if labels == 1 else "Identity")).rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise ConfigError(f"config.json has the activation {named!r} for scores", wanted="Sigmoid or Identity")
    where = "config.json" if named else "usual for its number of labels"
    reason = f"the head of {architecture}; {activation}: {where}"
    return Pooling((mode,), labels=labels, is_sigmoid=activation == "Sigmoid", reason=reason)


def _of_modules(folder: Path) -> Pooling:
    """Return the pooling of a list of modules: the model, one pooling, and optionally the scaling
    to length 1. Raises `ConfigError` for other modules, and for a file that lowercases text."""
    file = folder / MODULES
    modules = [(str(each.get("type", "")).rpartition(".")[2], str(each.get("path", ""))) for each in read_list(file)]
    kinds = tuple(kind for kind, _ in modules)
    if kinds not in (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")):
        raise ConfigError(
            f"{file} has the modules {', '.join(kinds)}",
            wanted="Transformer, Pooling and perhaps Normalize",
            remedy="use another model, or --task generate for text",
        )
    if modules[0][1]:
        raise ConfigError(f"{file} has its model in {modules[0][1]!r}", remedy="move those files next to modules.json")
    lowered = folder / "sentence_bert_config.json"
    if lowered.is_file() and read_json(lowered).get("do_lower_case"):
        raise ConfigError(
            f"{lowered} has do_lower_case", wanted="a tokenizer that lowercases", remedy="use another model"
        )
    return Pooling(
        _modes(folder / modules[1][1]), len(modules) == 3, reason=f"{MODULES} and {modules[1][1]}/config.json"
    )


def _modes(folder: Path) -> tuple[str, ...]:
    """Return the modes of a pooling from the `config.json` in its folder: its mode or modes, or the
    switches of older files in the order of `MODES`; without a switch, the mean. Raises
    `ConfigError` for an unknown mode, or if prompts are left out of the vector."""
    values = read_json(folder / "config.json")
    if not values.get("include_prompt", True):
        raise ConfigError(
            f"{folder / 'config.json'} has include_prompt false",
            wanted="vectors of all tokens",
            remedy="use another model",
        )
    given = values.get("pooling_mode") or [mode for mode, switch in MODES.items() if values.get(switch)] or "mean"
    modes = tuple(given) if isinstance(given, list) else (given,)
    for mode in modes:
        if not isinstance(mode, str) or mode not in MODES:
            raise ConfigError(f"{folder / 'config.json'} has the mode {mode!r}", wanted=f"one of {', '.join(MODES)}")
    return modes
