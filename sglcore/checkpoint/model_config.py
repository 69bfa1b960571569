"""The configuration of a model, read once from the checkpoint's `config.json`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.config_defaults import DEFAULTS, OPTIONS
from sglcore.checkpoint.config_synonyms import WORDS, renamed
from sglcore.checkpoint.config_types import check_values, is_truth
from sglcore.checkpoint.encoder_config import common_words, language_model
from sglcore.checkpoint.gguf_config import gguf_config
from sglcore.checkpoint.gguf_header import is_gguf, read_header
from sglcore.checkpoint.pooling_config import Pooling, read_pooling
from sglcore.core.errors import ConfigError

EMPTY: Mapping[str, Any] = MappingProxyType({})
PROPORTIONAL = "proportional"
"""The kind of rotary embedding with frequencies for the whole head; those of the rest after the
`partial` share are 0."""
NEAR = 0.6
"""An error suggests architectures with names at least this similar."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding with the base `theta`: `kind` is default, linear, dynamic, yarn,
    llama3, longrope or proportional.

    `scaling` has the kind's other words, under their names in the file.

    `partial` is the fraction of a head that is rotated; `original_max` is the context length before
    the extension (without one in the file, its `max_position_embeddings`).
    """

    theta: float
    kind: str
    partial: float
    original_max: int
    scaling: Mapping[str, Any]


EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
"""The usual names of an expert's projections in checkpoints."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts of a model, as its checkpoint describes it."""

    layers: tuple[bool, ...]
    """Whether each layer has experts."""
    num_experts: int
    """Experts in a layer."""
    experts_per_token: int
    """Experts that a token uses."""
    intermediate_size: int
    """The intermediate size of an expert."""
    normalize: bool
    """A token's weights are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights after that."""
    num_groups: int = 1
    """Groups into which the experts are divided."""
    top_groups: int = 1
    """Groups from which a token's experts are chosen."""
    shared_size: int = 0
    """The intermediate size of the shared expert. 0: there is none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The geometry of a model. `read_config` makes it from the checkpoint."""

    path: Path
    """The checkpoint folder, or the GGUF file."""
    architecture: str
    """The name of its architecture, as in `architectures` of `config.json`."""
    hidden_size: int
    """Elements of a hidden state."""
    num_hidden_layers: int
    """Layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a head."""
    intermediate_size: int
    """The intermediate size of dense layers."""
    vocab_size: int
    """Tokens in the vocabulary."""
    max_position_embeddings: int
    """Number of positions, as the checkpoint states it."""
    context_length: int
    """Tokens for which positions are defined, after the extension of the rotary embedding."""
    rms_norm_eps: float
    """The epsilon of the norms."""
    rope: RopeConfig
    """The rotary embedding; if `local_rope` is set, only that of layers without a sliding
    window."""
    sliding_windows: tuple[int | None, ...]
    """Sliding window of each layer, in tokens. None: full attention."""
    tie_word_embeddings: bool
    """Whether the output layer shares the weights of the embedding."""
    attention_bias: bool
    """Whether attention's projections have biases."""
    mlp_bias: bool
    """Whether the projections of dense blocks have biases."""
    hidden_act: str
    """The activation function."""
    dtype: str
    """The checkpoint's own element type, such as "bfloat16"."""
    moe: MoeConfig | None
    """The experts. None: all layers are dense."""
    pooling: Pooling | None
    """How a model that embeds or scores reduces its hidden states. None: it generates text."""
    raw: Mapping[str, Any]
    """`config.json`, unchanged."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The same, with the architecture's defaults, under the names that most architectures use."""
    library: Any = None
    """The configuration that a library has read, if the library runs the model itself. None: no
    library does."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `OPTIONS` that change something. An architecture refuses an option that it does
    not know."""
    local_rope: RopeConfig | None = None
    """The rotary embedding of layers with a sliding window. None: all layers have `rope`."""
    first_position: int = 0
    """The position of a request's first token."""

    @property
    def file(self) -> Path:
        """The file with this configuration, for errors: `config.json`, or the GGUF file."""
        return described_in(self.path)

    @property
    def attention_scaling(self) -> float:
        """Factor of attention scores: `attention_multiplier`, or else 1 /
        sqrt(`query_pre_attn_scalar`), or else 1 / sqrt(`head_dim`).
        """
        own = self.options.get("attention_multiplier")
        return self.options.get("query_pre_attn_scalar", self.head_dim) ** -0.5 if own is None else own

    @property
    def is_encoder(self) -> bool:
        """Whether the model runs whole prompts, keeps no KV cache and returns vectors or scores,
        with causal or bidirectional attention."""
        return self.pooling is not None


def read_config(path: str | Path, known: Collection[str] = (), task: str = "auto") -> ModelConfig:
    """Read the configuration of a checkpoint folder or a GGUF file. Raises `ConfigError`, and
    `CheckpointError` for a damaged file. `known`: the architectures that can be run (empty: any);
    `task`: as in EngineConfig."""
    folder = Path(path)
    if is_gguf(folder):
        raw = gguf_config(read_header(folder))
        check_architecture(raw["architectures"][0], known)
        return _parse(folder, raw["architectures"][0], raw, task)
    if not folder.is_dir():
        raise ConfigError(f"there is no model at {str(path)!r}", wanted="a checkpoint folder", remedy="check the path")
    raw = read_json(folder / "config.json", "this is not a checkpoint folder; point at the one with config.json")
    return config_of(folder, raw, known, task)


def described_in(path: Path) -> Path:
    """Return the file that describes the model: `config.json` in a checkpoint folder, or the GGUF
    file itself.
    """
    return path if is_gguf(path) else path / "config.json"


def config_of(folder: Path, raw: dict[str, Any], known: Collection[str] = (), task: str = "auto") -> ModelConfig:
    """Return the configuration of a checkpoint folder with `raw` as its `config.json`.

    The other arguments and the errors are those of `read_config`.
    """
    name = architecture_of(folder / "config.json", raw)
    if not name:
        raise ConfigError(f"{folder / 'config.json'} names no architecture", wanted='"architectures": ["..."]')
    check_architecture(name, known)
    check_values(folder / "config.json", raw, WORDS.get(name, EMPTY))
    return _parse(folder, name, raw, task)


def architecture_of(file: Path, raw: Mapping[str, Any]) -> str:
    """Return the first architecture that a `config.json` names; empty if it names none. Raises
    `ConfigError` if they are no list."""
    names = raw.get("architectures")
    check_values(file, {"architectures": names})
    return names[0] if names else ""


def check_architecture(name: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for an architecture that is not among `known` (empty: any is allowed)."""
    if known and name not in known:
        raise ConfigError(
            f"the architecture {name!r} is not supported",
            wanted=served(name, known),
            remedy="choose another model, or add a file for it (docs/add-a-model.md)",
        )


def served(name: str, known: Collection[str]) -> str:
    """Return the `wanted` text of the error for an unknown architecture: up to four of the known
    ones with the most similar names, if any are similar."""
    stems = {each: re.sub("(For[A-Z].*|Model)$", "", each).lower() for each in (name, *known)}
    near = [each for each in sorted(known) if SequenceMatcher(None, stems[name], stems[each]).ratio() > NEAR]
    return f"one that docs/models.md lists{', such as ' if near else ''}{', '.join(near[:4])}"


def check_context(asked: int | None, config: ModelConfig) -> None:
    """Raise `ConfigError` if the requested context, in tokens, exceeds `config.context_length`.
    None: no context was requested."""
    if asked is None or asked <= config.context_length:
        return
    found = against_longer(config) or f"the checkpoint's context is {config.context_length}"
    raise ConfigError(
        f"max_model_len is {asked}, {found}", remedy=f"set max_model_len to at most {config.context_length}"
    )


def against_longer(config: ModelConfig) -> str:
    """Return why a text may not have more than `context_length` tokens, although the checkpoint
    allows more; empty if it does not."""
    if config.words.get("dense_context", config.max_position_embeddings) >= config.max_position_embeddings:
        return ""
    return (
        f"in texts of more than {config.context_length} tokens {config.architecture} attends to selected tokens, "
        "which is not supported yet"
    )


def _parse(folder: Path, architecture: str, raw: dict[str, Any], task: str) -> ModelConfig:
    file = described_in(folder)
    values = Words(file, _said(architecture, raw))
    values.update(renamed(architecture, values))
    need = _Needed(values, file)
    heads, layers = need("num_attention_heads"), need("num_hidden_layers")
    max_positions = need("max_position_embeddings")
    rope, local_rope = _ropes(values, max_positions)
    config = ModelConfig(
        path=folder,
        architecture=architecture,
        hidden_size=need("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or need("hidden_size") // heads,
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        max_position_embeddings=max_positions,
        context_length=_context_length(values, rope, max_positions) - values.get("first_position", 0),
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=_sliding_windows(values, layers),
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        attention_bias=values.get("attention_bias", values.get("qkv_bias", False)),
        mlp_bias=values.get("mlp_bias", False),
        hidden_act=_activation(architecture, values),
        dtype=str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch."),
        moe=_moe(values, layers),
        pooling=read_pooling(folder, architecture, raw, task),
        raw=MappingProxyType(raw),
        words=MappingProxyType(values),
        options=MappingProxyType({name: values[name] for name in OPTIONS if _is_set(values.get(name), OPTIONS[name])}),
        local_rope=local_rope,
        first_position=values.get("first_position", 0),
    )
    _check(config)
    return config


class Words(dict[str, Any]):
    """A configuration's values. `[]` with a missing name raises `ConfigError` with the name."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._file = file

    def __missing__(self, name: str) -> Any:
        raise ConfigError(f"{self._file} has no {name!r}, or null", remedy="download the checkpoint again")


def _said(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values with the architecture's defaults. A written null replaces a default:
    the feature is off, or the value is False. Only rotary embeddings keep their default then,
    because these models need one; older names for them replace the default as a whole. The result
    has no nulls."""
    defaults = {**DEFAULTS.get(language_model(architecture), EMPTY), **common_words(architecture, raw)}
    rope = None if raw.get("rope_scaling") else defaults.pop("rope_parameters", None)
    values = {**defaults, **{name: False if value is None and is_truth(name) else value for name, value in raw.items()}}
    if rope and raw.get("rope_theta"):
        rope = {**rope, "rope_theta": raw["rope_theta"]}
    values["rope_parameters"] = rope if raw.get("rope_parameters") is None else raw["rope_parameters"]
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Needed:
    values: Mapping[str, Any]
    file: Path

    def __call__(self, name: str) -> int:
        if name not in self.values:
            raise ConfigError(f"{self.file} has no {name!r}", wanted="a number", remedy="download the checkpoint again")
        return self.values[name]


def _is_set(value: Any, neutral: Any) -> bool:
    return value is not None and value != neutral


def _activation(architecture: str, values: Mapping[str, Any]) -> str:
    """Return the name of the activation; without one in the file, "silu". Old Gemma checkpoints say
    "gelu" for its tanh approximation.
    """
    found = values.get("hidden_activation", values.get("hidden_act", "silu"))
    return "gelu_pytorch_tanh" if architecture == "GemmaForCausalLM" and found == "gelu" else found


def _ropes(values: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of layers without a window, and that of layers with one if it
    differs. Reads both dialects: `rope_parameters`, which may have an entry for each kind of layer,
    and the older `rope_theta` with `rope_scaling` and `rope_local_base_freq`. Raises `ConfigError`
    if they differ by layer in another way."""
    scaling = {**values.get("rope_parameters", EMPTY), **values.get("rope_scaling", EMPTY)}
    nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
    theta = values.get("rope_local_base_freq")
    if not nested:
        local = None if theta is None else rope_config({"rope_theta": theta}, values, max_positions)
        return rope_config(scaling, values, max_positions), local
    if set(nested) != {"full_attention", "sliding_attention"} or theta is None:
        raise ConfigError(f"rope parameters differ by layer ({', '.join(nested)})", wanted="one set for all layers")
    local = {"rope_theta": theta, **scaling["sliding_attention"]}
    full = {**scaling["full_attention"], **values.get("rope_scaling", EMPTY)}
    return rope_config(full, values, max_positions), rope_config(local, values, max_positions)


def rope_config(given: Mapping[str, Any], values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Return the rotary embedding of one kind of layers, from `given` and the common `values`. Its
    kind is in `rope_type` or `type` (none: default). With `long_factor` it is longrope, whatever
    its name ("su" or "yarn" in old checkpoints); "mrope" becomes default. A null number counts as
    missing.
    """
    scaling: dict[str, Any] = {
        name: False if value is None else value for name, value in given.items() if value is not None or is_truth(name)
    }
    theta = scaling.pop("rope_theta", values.get("rope_theta", 10000.0))
    partial = scaling.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    old_kind = scaling.pop("type", "default")
    kind = str(scaling.pop("rope_type", old_kind))
    original = values.get("original_max_position_embeddings", scaling.pop("original_max_position_embeddings", None))
    return RopeConfig(
        theta=float(theta),
        kind="longrope" if "long_factor" in scaling else "default" if kind == "mrope" else kind,
        partial=float(partial),
        original_max=int(original or max_positions),
        scaling=MappingProxyType(scaling),
    )


def _context_length(values: Mapping[str, Any], rope: RopeConfig, max_positions: int) -> int:
    """Return the context length. Yarn checkpoints often state the length before the extension; all
    other kinds state the final length. `dense_context` limits it: in a longer text, layers would
    attend to selected tokens only."""
    if rope.kind == "yarn":
        max_positions = max(max_positions, int(rope.original_max * float(rope.scaling.get("factor") or 1.0)))
    return min(max_positions, values.get("dense_context", max_positions))


def _sliding_windows(values: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Windows are on only if a switch in the file, the
    architecture, or the layer types say so.

    A written null means no window. Without layer types, the layers with a window are all except
    each `sliding_window_pattern`-th, or those from `max_window_layers` on.
    """
    window, pattern = values.get("sliding_window"), values.get("sliding_window_pattern")
    kinds = values.get("layer_types")
    if kinds is None and pattern:
        windowed = [(layer + 1) % pattern != 0 for layer in range(values.get("max_window_layers", layers))]
        kinds = ["sliding_attention" if has else "full_attention" for has in (*windowed, *[False] * layers)[:layers]]
    if window is None or not values.get("use_sliding_window", kinds is not None):
        return (None,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = values.get("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _moe(values: Mapping[str, Any], layers: int) -> MoeConfig | None:
    """Return the mixture of experts of `layers` layers; None for a model without a number or a size
    of experts. With `num_local_experts` and no `moe_intermediate_size`, `intermediate_size` is an
    expert's size."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((values[name] for name in names if values.get(name)), 0)
    size = values.get("moe_intermediate_size", values.get("intermediate_size" if "num_local_experts" in values else ""))
    if not experts or size is None:
        return None
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers", ())
    first = values.get("first_k_dense_replace", 0)
    sparse = ((layer + 1) % step == 0 and layer not in dense and layer >= first for layer in range(layers))
    kinds = values.get("mlp_layer_types")
    return MoeConfig(
        layers=tuple(sparse) if kinds is None else tuple(kind != "dense" for kind in kinds),
        num_experts=experts,
        experts_per_token=values.get("num_experts_per_tok", 8),
        intermediate_size=size,
        normalize=values.get("norm_topk_prob", False),
        scale=values.get("routed_scaling_factor", 1.0),
        num_groups=values.get("n_group", 1),
        top_groups=values.get("topk_group", 1),
        shared_size=values.get("shared_expert_intermediate_size", values.get("n_shared_experts", 0) * size),
    )


def _check(config: ModelConfig) -> None:
    _check_kinds(config)
    _check_experts(config)
    found = f"{config.num_attention_heads} query heads for {config.num_key_value_heads} key-value heads"
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(f"{config.file} gives {found}", wanted="a multiple")
    if config.head_dim < 1:
        raise ConfigError(
            f"{config.file} gives {config.hidden_size} elements to {config.num_attention_heads} heads",
            wanted="at least one element per head",
        )
    rotated = config.head_dim if config.rope.kind == PROPORTIONAL else int(config.head_dim * config.rope.partial)
    if rotated % 2:
        raise ConfigError(f"{config.file} rotates {rotated} elements of a head", wanted="an even number")
    layers = config.num_hidden_layers
    each = {
        "layer_types": config.sliding_windows,
        "mlp_layer_types": (True,) * layers if config.moe is None else config.moe.layers,
    }
    for name, found in each.items():
        if len(found) != layers:
            raise ConfigError(f"{config.file} has {len(found)} {name}", wanted=f"{layers}, one for each layer")


def _check_kinds(config: ModelConfig) -> None:
    """Raise `ConfigError` for a kind of attention that no model here supports.

    Without this check the weights of such a layer would load into another kind of attention.
    """
    known = ("attention", "full_attention", "sliding_attention", "linear_attention")
    unknown = [kind for kind in config.words.get("layer_types", ()) if kind.endswith("attention") and kind not in known]
    if unknown:
        raise ConfigError(f"{config.file} has layers of {unknown[0]!r}", wanted=f"one of {', '.join(known)}")


def _check_experts(config: ModelConfig) -> None:
    moe = config.moe
    if moe is None or not any(moe.layers):
        return
    grouped = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups or not 0 < moe.experts_per_token <= grouped:
        raise ConfigError(
            f"{config.file} has {moe.experts_per_token} experts per token, from {moe.top_groups} of "
            f"{moe.num_groups} groups of {moe.num_experts} experts",
            wanted=(
                "no more than exist: num_experts_per_tok, topk_group and n_group must fit together, defaults included"
            ),
        )
