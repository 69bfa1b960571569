"""Each family with a file here at about 100 million weights: by that file, by transformers' class on the engine, and by plain
`generate`, in one run.

    python -m benchmarks.native_families [FAMILY ...] [--rounds 2] [--out benchmarks/results/native_families.json]

Decode is milliseconds a step at 1 and 8 requests in bfloat16. The ways take turns, because a machine's speed drifts; what counts is
their ratio. A way that refuses a family has its reason instead of figures.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.made_models import make_model
from benchmarks.results import machine, write_results
from benchmarks.transformers_form import measured
from sglcore.device.errors import ConfigError

WAYS = ("native recorded", "transformers recorded", "generate")
STEPS = 24
WINDOW = {"sliding_window": 512}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "num_hidden_layers": 10}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 384}
ROUTED = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 192, "num_hidden_layers": 10}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
}
SPACE = {"mamba_n_heads": 24, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 128}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 4}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "mistral": WINDOW,
        "qwen2": {},
        "qwen3": {},
        "gemma": {},
        "gemma2": WINDOW,
        "gemma3_text": WINDOW,
        "glm": {},
        "glm4": {},
        "phi3": {},
        "granite": {},
        "olmo2": {},
        "olmo3": WINDOW,
        "gpt_oss": {**ROUTED, **WINDOW},
        "mixtral": ROUTED,
        "granitemoe": ROUTED,
        "qwen2_moe": SHARED,
        "qwen3_moe": EXPERTS,
        "glm4_moe": {**EXPERTS, "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "qwen3_next": {**SHARED, **DELTA, "num_hidden_layers": 12},
        "qwen3_5_text": DELTA,
        "qwen3_5_moe_text": {**SHARED, **DELTA, "num_hidden_layers": 12},
        "granitemoehybrid": {
            **SPACE,
            **ROUTED,
            "shared_intermediate_size": 512,
            "layer_types": (["linear_attention"] * 4 + ["full_attention"]) * 2,
        },
        "lfm2": CONVOLUTIONS,
        "lfm2_moe": {**EXPERTS, **CONVOLUTIONS, "num_hidden_layers": 12, "num_dense_layers": 2},
        "nemotron_h": {
            "mamba_num_heads": 24,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * 6,
        },
    }
)
"""By transformers' type, what differs from `BASE`."""


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in asked.families:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = _family(kind, Path(folder), asked.rounds)
        print(kind, found[kind], flush=True)
    if asked.out is not None:
        told = {"machine": machine(), "dtype": "bfloat16", "best of": asked.rounds, "families": found}
        write_results(asked.out, told)


def _family(kind: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of each way, and how many times as fast as the others native is."""
    weights = make_model(folder, kind, FAMILIES[kind])
    best: dict[str, dict[str, float]] = defaultdict(dict)
    refused: dict[str, str] = {}
    for way in WAYS * rounds:
        if way in refused:
            continue
        try:
            for name, value in measured(way, folder, "bfloat16", steps=STEPS, times=2, has_prefill=False):
                best[way][name] = round(min(value, best[way].get(name, value)), 3)
        except ConfigError as error:
            refused[way] = str(error)
    native = best[WAYS[0]]
    times = {way: {name: round(value / native[name], 2) for name, value in best[way].items()} for way in WAYS[1:]}
    return {"million weights": round(weights / 1e6), "ms": best, "times native": times} | (
        {"refused": refused} if refused else {}
    )


if __name__ == "__main__":
    main()
