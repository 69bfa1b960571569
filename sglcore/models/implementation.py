"""Chooses how an architecture runs: by a file of sglcore, or by transformers' own class if there is
none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import EMPTY, ModelConfig, architecture_of, read_config, served
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.architecture_registry import ARCHITECTURES
from sglcore.models.checkpoint_code import brings_code, code_files, code_modules
from sglcore.models.transformers_backend.verified_types import PROVEN, VERSION

TRANSFORMERS = "sglcore.models.transformers_backend.transformers_model:TransformersModel"
REMEDY = "choose with --model-impl"


def choose_implementation(
    asked: str,
    path: Path,
    ledger: DecisionLedger,
    has_torch: bool = True,
    task: str = "auto",
    trusts_code: bool = False,
) -> tuple[ModelConfig, Mapping[str, str]]:
    """Return the configuration of a checkpoint for `task` (EngineConfig's), and the entries to add
    to the registry: empty if sglcore's own file runs the model, one entry if transformers does.
    `asked` is EngineConfig's `model_impl`: "auto" (transformers only without a file of sglcore),
    "native" or "transformers". `has_torch`: the device has torch; without, only sglcore's files.
    Records the choice, and the pooling of a model that has one, in the ledger. `trusts_code`: code
    in the checkpoint's folder may run if nothing else supports the architecture.

    Raises `ConfigError` for an implementation that is not available for this device or file, for an
    architecture that neither supports, and for a class of transformers that gives other results
    here than by itself; also raises the errors of reading the configuration.
    """
    _check_asked(asked, path, has_torch)
    if asked == "native" or not has_torch or (asked == "auto" and _architecture(path) in {*ARCHITECTURES, ""}):
        config = read_config(path, ARCHITECTURES, task)
        module = ARCHITECTURES[config.architecture].partition(":")[0]
        ledger.record(
            Row("model impl", asked, "native", f"sglcore implements {config.architecture} in {module}", REMEDY)
        )
    else:
        config = _by_transformers(asked, path, ledger, task, trusts_code)
    if config.pooling is not None:
        ledger.record(Row("pooling", task, str(config.pooling), config.pooling.reason, "choose with --task"))
    return config, EMPTY if config.library is None else MappingProxyType({config.architecture: TRANSFORMERS})


def _by_transformers(asked: str, path: Path, ledger: DecisionLedger, task: str, trusts_code: bool) -> ModelConfig:
    raw = read_json(path / "config.json", "this is not a checkpoint folder; point at the one with config.json")
    kind = str(raw.get("model_type", ""))
    name = architecture_of(path / "config.json", raw) or "an architecture without a name"
    _check_transformers(raw, name, kind, asked)
    runs_code = _needs_code(raw, name, kind)
    if runs_code and not trusts_code:
        raise ConfigError(
            f"{name!r} brings code of its own, {', '.join(code_modules(raw))}, which is not run",
            wanted="an architecture of sglcore or of transformers",
            remedy="use another model, or read that code and start with --trust-remote-code",
        )
    if runs_code:
        files = ", ".join(code_files(path, raw))
        why = "--trust-remote-code: these files of the checkpoint run with all rights of this process"
        ledger.record(Row("remote code", "none", files, why, "use a model without code", downgrade=True))
    from sglcore.models.transformers_backend.transformers_config import transformers_config

    config = transformers_config(path, task, runs_code)
    why = "requested" if asked == "transformers" else f"sglcore does not implement {config.architecture}"
    reason, downgrade = _proof(config, kind, is_proven=kind in PROVEN and not runs_code)
    ledger.record(Row("model impl", asked, "transformers", f"{why}; {reason}", REMEDY, downgrade))
    return config


def _needs_code(raw: Mapping[str, Any], name: str, kind: str) -> bool:
    """Return whether the checkpoint's own code runs: `config.json` names some, unless the type is
    in `PROVEN` and its class in transformers has this architecture's name."""
    if kind not in PROVEN or not brings_code(raw):
        return brings_code(raw)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]


def _proof(config: ModelConfig, kind: str, is_proven: bool) -> tuple[str, bool]:
    """Return, for the ledger, a text that says why a model gives the results of its class's own
    forward, and whether that counts as a downgrade: the type was compared only now, at load, with a
    tiny model, or with another version of transformers than the installed one. Raises `ConfigError`
    if the results differ."""
    from transformers import __version__ as found

    if not is_proven:
        from sglcore.models.transformers_backend.equivalence_check import check

        error = check(config, TRANSFORMERS)
        what = f"{config.architecture} was not compared before; checked at load, with a tiny model of the same options"
        return f"{what}: log-probabilities differ by at most {error:.1g} from its own forward", True
    reason = f"{kind!r} of transformers {VERSION} gives the results of its own forward"
    return (reason, False) if found == VERSION else (f"{reason}, and {found} is installed", True)


def _check_asked(asked: str, path: Path, has_torch: bool) -> None:
    """Raise `ConfigError` for "native" without a file of sglcore for the architecture, and for
    "transformers" on a device without torch or for a GGUF file."""
    if asked == "native" and (name := _architecture(path)) not in {*ARCHITECTURES, ""}:
        raise ConfigError(
            f"sglcore does not implement the architecture {name!r}",
            wanted=served(name, ARCHITECTURES),
            remedy="leave --model-impl out: transformers' class may run it",
        )
    if asked == "transformers" and not has_torch:
        raise ConfigError(
            "transformers' own classes need torch, which this device does not have",
            remedy="leave --model-impl out, or choose a device with torch, such as --device cpu",
        )
    if asked == "transformers" and is_gguf(path):
        raise ConfigError(
            f"transformers' own classes read safetensors weights, and {path} is a GGUF file",
            remedy="leave --model-impl out, or use the checkpoint that it was made from",
        )


def _architecture(path: Path) -> str:
    """Return the architecture in `config.json`; empty if the file names none or does not exist, as
    for a GGUF file: `read_config` reports it."""
    file = path / "config.json"
    return architecture_of(file, read_json(file)) if file.is_file() else ""


def _check_transformers(raw: Mapping[str, Any], name: str, kind: str, asked: str) -> None:
    """Raise `ConfigError` for a type that is not in `PROVEN`, unless the checkpoint has code of its
    own or transformers is requested; and if transformers is not installed."""
    if kind not in PROVEN and not brings_code(raw) and asked != "transformers":
        raise ConfigError(
            f"the architecture {name!r} is not supported: sglcore does not implement it, and transformers' type "
            f"{kind!r} is not "
            "among those that were compared with transformers' own forward",
            wanted=served(name, ARCHITECTURES),
            remedy="use another model, or have this one compared at load with --model-impl transformers",
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{name!r} runs with transformers' own class, and transformers is not installed",
            remedy="pip install 'sglcore[transformers]'",
        )
