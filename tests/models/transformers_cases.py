"""Tiny random models of transformers' types, and the engine's difference from their own forward."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.models.implementation import TRANSFORMERS
from sglcore.models.transformers_backend.equivalence_check import difference, whole
from sglcore.models.transformers_backend.transformers_config import transformers_config
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import Limits
from tests.models.steps import PAGE, SLOTS, Steps

SIZES: Mapping[str, Any] = tomllib.loads(
    (Path(__file__).resolve().parents[2] / "tools" / "sweep_models.toml").read_text()
)
SNAPSHOTS = 4


def sizes_of(kind: str) -> dict[str, Any]:
    """The tiny configuration of a type."""
    own = dict(SIZES["types"].get(kind, {}))
    without = own.pop("without", ())
    return {**{name: size for name, size in SIZES["base"].items() if name not in without}, **own}


def tiny_model(kind: str, sizes: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model of a type with random weights and eager attention. Noise on every parameter keeps
    constant ones (0 or 1) from hiding a defect."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def exacting() -> KernelTable:
    """The reference kernels with the strictest input requirement of any device: the elements of a
    row are contiguous."""
    declared = KernelTable.declared().items()
    return KernelTable().replace(**{name: _exacting(name, one.reference) for name, one in declared if one.reference})


def _exacting(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        for place, each in enumerate(args):
            if isinstance(each, Tensor) and each.dim() and each.shape[-1] > 1 and each.numel():
                assert each.stride(-1) == 1, f"{name}: argument {place} {list(each.shape)} has strides {each.stride()}"
        return reference(*args, **named)

    return called


def load(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, kernels: KernelTable | None = None
) -> Any:
    """Save the model and load it as the engine does for transformers' classes."""
    model.save_pretrained(folder)
    config = transformers_config(folder)
    found = {config.architecture: TRANSFORMERS}
    kernels = kernels or exacting()
    return load_model(folder, config, kernels=kernels, device="cpu", dtype=dtype, architectures=found)


def compare(model: PreTrainedModel, folder: Path, seed: int = 0, kernels: KernelTable | None = None) -> float:
    """The `difference` of a model and its loaded copy."""
    return difference(model, load(model, folder, kernels=kernels), seed)


def compare_served(model: PreTrainedModel, folder: Path) -> float:
    """The largest error of served tokens' log-probabilities against the model's own forward of each
    text. With few slots and pages, short chunks and overlap, so that prefixes are hit and requests
    are preempted."""
    loaded = load(model, folder)
    limits = Limits(
        max_model_len=48,
        max_requests=SLOTS,
        page_size=PAGE,
        num_pages=16,
        max_batch_tokens=8,
        vocab_size=loaded.config.vocab_size,
        keeps_state=bool(loaded.state_layers),
        num_snapshots=SNAPSHOTS if loaded.state_layers else 0,
    )
    runner = Steps(loaded, SNAPSHOTS).runner
    loop = Loop(Scheduler(limits), TpModelWorker(runner, runner.token_table, limits), overlap=True)
    requests = _serve(loop, loaded.config.vocab_size)
    stats = loop.scheduler.stats()
    assert stats.retractions and stats.hit_tokens, stats
    return max(_error(model, request) for request in requests)


def _serve(loop: Loop, vocab_size: int) -> list[Request]:
    """Run a prompt, then it again with prompts that branch off from it, then those again."""
    rng, params = np.random.default_rng(3), SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=14)
    base, *tails = (rng.integers(3, vocab_size, length).astype(np.int32) for length in (21, 3, 7, 18))
    branches = [np.concatenate([base[:13], tail]) for tail in tails]
    done: list[Request] = []
    for prompts in ([base], [base, *branches], branches):
        for prompt in prompts:
            done.append(Request(f"r{len(done)}", prompt, params, seed=0))
            loop.scheduler.add(done[-1])
        while loop.has_work:
            loop.step()
    loop.scheduler.audit()
    return done


def _error(model: PreTrainedModel, request: Request) -> float:
    """The largest error of the log-probabilities of a request's tokens."""
    assert request.finish_reason == "length", request.error
    prompt, tokens = request.prompt_ids.tolist(), list(request.output_ids)
    wanted = whole(model, torch.tensor(prompt + tokens))[len(prompt) - 1 : -1]
    chosen = wanted[torch.arange(len(tokens)), torch.tensor(tokens)]
    found = torch.tensor([float(each.chosen[0]) for each in request.logprobs])
    return float((chosen - found).abs().max())
