"""Engines for this package's tests: a started device with tokens as input and output, tiny
checkpoints, and comparisons. Does not use torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sglcore.config.engine_config import resolve_config
from sglcore.conformance.inputs.prompts import VOCAB
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.session import Drive, Result, Session, open_session
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.start import start
from sglcore.worker.model_worker import ModelWorker

CONTEXT = 128
SPOILED = (0, 1)
"""Tokens with NaN embeddings in a checkpoint written with `spoiled=True`; padding rows hold the
first one."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"threads": 1, "dtype": "float32", "max_requests": 6, "page_size": 4, "max_batch_tokens": 64, "graph": "off"}
)
TINY: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
)
HYBRID: Mapping[str, Any] = MappingProxyType(
    {
        **TINY,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": TINY["intermediate_size"],
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_head": 8,
        "mamba_d_state": 6,
        "mamba_d_conv": 3,
    }
)
"""A Mamba 2 layer, an attention layer without position embedding, and a Mamba 2 layer."""


def write_tiny(folder: Path, seed: int = 0, *, spoiled: bool = False, hybrid: bool = False) -> Path:
    """Write a random decoder of two layers, or a hybrid of three, as a float32 checkpoint, with
    numpy only. Return the folder."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, shape in (_hybrid_shapes() if hybrid else _shapes()).items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        scale = 1.0 if "embed" in name else 1.2 * shape[-1] ** -0.5
        weights[name] = 1 + np.float32(0.2) * drawn if "norm" in name else drawn * np.float32(scale)
    if spoiled:
        weights["model.embed_tokens.weight"][list(SPOILED)] = np.nan
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(HYBRID if hybrid else TINY), indent=1))
    save_file(weights, folder / "model.safetensors")
    return folder


def _hybrid_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = HYBRID["hidden_size"], HYBRID["shared_intermediate_size"], HYBRID["mamba_n_heads"]
    mixed = heads * HYBRID["mamba_d_head"]
    channels = mixed + 2 * HYBRID["mamba_n_groups"] * HYBRID["mamba_d_state"]
    plain, shapes = _shapes(), {"model.norm.weight": (hidden,)}
    for layer, kind in enumerate(HYBRID["layer_types"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}.shared_mlp.input_linear.weight": (2 * inner, hidden)}
        shapes |= {f"{prefix}.shared_mlp.output_linear.weight": (hidden, inner)}
        if kind == "attention":
            shapes |= {name: shape for name, shape in plain.items() if name.startswith(f"{prefix}.self_attn.")}
            continue
        mamba = f"{prefix}.mamba"
        shapes |= {f"{mamba}.in_proj.weight": (mixed + channels + heads, hidden), f"{mamba}.norm.weight": (mixed,)}
        shapes |= {f"{mamba}.conv1d.weight": (channels, 1, HYBRID["mamba_d_conv"]), f"{mamba}.conv1d.bias": (channels,)}
        shapes |= {f"{mamba}.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
        shapes |= {f"{mamba}.out_proj.weight": (hidden, mixed)}
    return shapes | {name: plain[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
    queries, keys = TINY["num_attention_heads"] * TINY["head_dim"], TINY["num_key_value_heads"] * TINY["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(TINY["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (keys, hidden) for name in ("k", "v")}
        shapes |= {f"{prefix}.self_attn.q_proj.weight": (queries, hidden)}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (hidden, queries)}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (hidden, inner)}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


class TokenEngine:
    """A device started on a checkpoint, without a tokenizer. Also a context manager; `close` frees
    the device."""

    def __init__(self, folder: Path, device: str = "mlx", ranks: RankOptions | None = None, **settings: Any) -> None:
        config = resolve_config({**DEFAULTS, **settings, "device": device, "model": str(folder)}, {})
        self.started = start(config, ranks=ranks)
        self.worker: ModelWorker = self.started.worker
        self.recorder = RecordingWorker(self.worker)

    def session(self, **how: Any) -> Session:
        """Return a session with a new scheduler; `how` are the fields of `Drive`; overlap
        and the prefix cache are on by default."""
        return open_session(self.recorder, Drive(**{"overlap": True, "prefix_cache": True, **how}))

    def close(self) -> None:
        """Close the worker."""
        self.recorder.close()

    def __enter__(self) -> TokenEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_same(found: Sequence[Result], wanted: Sequence[Result], tolerance: float) -> None:
    """Assert that requests have equal tokens, and equal log-probabilities within the tolerance."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.tokens == other.tokens, f"request {number}: {first_difference(one, other)}"
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=tolerance, rtol=0, err_msg=f"request {number}")
        np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=tolerance, rtol=0)


def first_difference(one: Result, other: Result) -> str:
    """Describe the first difference of two token sequences, with the log-probabilities there."""
    place = next(
        (i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1]),
        min(len(one.tokens), len(other.tokens)),
    )
    mine, theirs = (list(zip(r.tokens, r.logprobs, strict=False))[place : place + 1] for r in (one, other))
    return f"token {place} is {mine}, the other's {theirs}; {len(one.tokens)} and {len(other.tokens)} tokens"
