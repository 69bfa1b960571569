"""Python of an eager pass through a model of 28 layers, beyond its operations: an old commit beside this one, in one run.

Every kernel and the attention backend return what was made before; the pass less the same calls in a flat loop is what the
layers themselves cost.

    python benchmarks/model_overhead.py [--old COMMIT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from beside_commit import extracted
from results import machine, write_results
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 28, 64, 4, 2, 16, 128, 32
WIDTHS = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
PASSES, ROUNDS = 400, 5
WANTED = 60.0
"""Microseconds of a pass."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def write_checkpoint(folder: Path) -> None:
    """A model of 28 narrow layers."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, width in zip(("q_proj", "k_proj", "v_proj"), WIDTHS, strict=True):
            shapes[f"{attention}.{name}.weight"] = (width, HIDDEN)
        shapes |= {f"{attention}.o_proj.weight": (HIDDEN, WIDTHS[0]), f"{mlp}.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{attention}.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{mlp}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (HIDDEN,) for name in norms}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


class Free:
    """Kernels and attention that return constants; with `calls`, they put their calls there first."""

    def __init__(self, calls: list[Call] | None = None) -> None:
        self.facts = SimpleNamespace(takes_stored=True)  # where commits before pools had layouts look
        self.takes_stored = True
        self.token_to_kv_pool = SimpleNamespace(kv=lambda layer: (None, None))
        self.qkv = torch.zeros(1, sum(WIDTHS))
        self._calls = calls
        self.forward = self._seen(lambda q, k, v, layer, batch: q)

    def table(self) -> Any:
        """The kernel table of it."""
        from sglcore.runtime.kernels import reference
        from sglcore.runtime.kernels.table import KernelTable

        hidden, q = torch.zeros(1, HIDDEN), torch.zeros(1, WIDTHS[0])
        out = {size: torch.zeros(1, size) for size in (HIDDEN, 2 * INNER)} | {sum(WIDTHS): self.qkv}
        free: dict[str, Callable[..., Any]] = {
            "rms_norm": lambda x, weight, eps: x,
            "add_rms_norm": lambda x, residual, weight, eps: (x, residual),
            "linear": lambda x, weight, bias: out[len(weight)],
            "silu_and_mul": lambda x: x,
            "embedding": lambda ids, weight: hidden,
            "norm_rotary_and_store": lambda *inputs: q,
        }
        entries: dict[str, Any] = {name: self._seen(function) for name, function in free.items()}
        if "reference_kernels" in vars(reference):  # the table of commits before a kernel was declared once
            return replace(vars(reference)["reference_kernels"](), **entries)
        return KernelTable().replace(**entries)

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = self._calls
        if calls is None:
            return function

        def call(*inputs: Any) -> Any:
            calls.append((function, inputs))
            return function(*inputs)

        return call


def make_pass(folder: Path, free: Free) -> Callable[[], object]:
    """One forward of the checkpoint over free kernels."""
    from sglcore.checkpoint.config import read_config
    from sglcore.models.loader import load_model
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.forward_context import ForwardContext, forward_context

    made = load_model(folder, read_config(folder), kernels=free.table(), device="cpu", dtype=torch.float32)
    place = torch.zeros(1, dtype=torch.int32)
    batch = ForwardBatch(input_ids=place, positions=place, out_cache_loc=place)
    context: Any = ForwardContext(free, batch, made.attention_layers)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        with forward_context(context):
            made(batch)

    return run


def measure() -> dict[str, float]:
    """Median microseconds of a pass, and of its operations in a flat loop."""
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder, calls, bare = Path(name), [], Free()
        write_checkpoint(folder)
        make_pass(folder, Free(calls))()
        calls += [(torch.Tensor.split, (bare.qkv, list(WIDTHS), -1))] * LAYERS
        whole, flat = cost(make_pass(folder, bare)), cost(lambda: [function(*inputs) for function, inputs in calls])
    return {"pass_us": whole, "operations_us": flat}


def cost(run: Callable[[], object]) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(PASSES):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return round(median(times) * 1e6, 1)


def measured_in(root: Path) -> dict[str, float]:
    """The same in a process of its own that imports the tree at `root`."""
    here = str(Path(__file__).parent)
    told = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), here)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure"]
    return json.loads(subprocess.run(command, env=told, cwd=root, check=True, capture_output=True, text=True).stdout)


def compare(old: str) -> dict[str, dict[str, float]]:
    """Both trees by turns; of each figure the smallest of its rounds, and what these leave for Python."""
    with tempfile.TemporaryDirectory() as folder:
        trees = {old: extracted(old, Path(folder)), "this": Path(__file__).resolve().parent.parent}
        found = [{name: measured_in(root) for name, root in trees.items()} for _ in range(ROUNDS)]
    least = {name: {figure: min(turn[name][figure] for turn in found) for figure in found[0][name]} for name in trees}
    return {name: {**f, "python_us": round(f["pass_us"] - f["operations_us"], 1)} for name, f in least.items()}


def main() -> None:
    """Print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="2349cd2", help="the commit that this tree is compared with")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--measure", action="store_true", help="measure the tree that is imported, and print the figures"
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    found = compare(options.old)
    for name, figures in found.items():
        print(f"{name:>8}: pass {figures['pass_us']:7.1f} us, beyond its operations {figures['python_us']:7.1f} us")
    print(f"wanted: at most {WANTED} us beyond its operations in {LAYERS} layers")
    if options.json:
        write_results(options.json, {"machine": machine(), "layers": LAYERS, "wanted_us": WANTED, "trees": found})


if __name__ == "__main__":
    main()
