"""Checks that the engine gives the same results as a model of transformers by itself, with a tiny
random model of the same class and options.

Both compute on the CPU in float32: the class by its own forward, the engine by the reference
kernels and attention.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.models.layer_kinds import Architecture
from sglcore.models.single_steps import CONTEXT, Steps
from sglcore.models.transformers_backend.small_config import shrunk
from sglcore.models.transformers_backend.transformers_config import Library, described
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable

EQUAL = 2e-4
"""The tolerance: the greatest difference of log-probabilities that counts as equal."""

LENGTH, OTHER = 40, 23
"""Numbers of tokens in the two requests."""


def check(config: ModelConfig, implementation: str) -> float:
    """Return the greatest difference of log-probabilities between the engine and the class of
    transformers in `config`, which `transformers_config` made. `implementation`: the engine's class
    for it, as `module:class`. Raises `ConfigError` if the difference exceeds `EQUAL`, or if the two
    can not be compared."""
    kind = config.library.config.model_type
    try:
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            small = shrunk(config.library)
            own = random_model(small)
            _save(own, folder)
            tiny = described(Path(folder), config.raw, small, "generate")
            found = difference(own, _loaded(tiny, implementation))
    except SglcoreError as error:
        raise ConfigError(f"transformers' type {kind!r} cannot be served: {error}") from error
    except Exception as error:
        said = " ".join(str(error).split())
        raise _refusal(kind, f"a tiny model of it fails ({type(error).__name__}: {said})") from error
    if not found <= EQUAL:
        raise _refusal(
            kind, f"a tiny model of it gives log-probabilities that differ by {found:.2g} from its own forward's"
        )
    return found


def _save(model: PreTrainedModel, folder: str) -> None:
    """Save a model without a progress bar."""
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if is_shown:
            logging.enable_progress_bar()


def _loaded(config: ModelConfig, implementation: str) -> Architecture:
    return load_model(
        config.path,
        config,
        kernels=KernelTable(),
        device="cpu",
        dtype=torch.float32,
        max_positions=min(CONTEXT, config.context_length),
        architectures={config.architecture: implementation},
    )


def _refusal(kind: str, what: str) -> ConfigError:
    return ConfigError(
        f"transformers' type {kind!r} cannot be served: {what}",
        wanted=f"a difference of at most {EQUAL:g}",
        remedy="use another model",
    )


def random_model(library: Library) -> PreTrainedModel:
    """Make a model with random weights that runs its own eager attention. Parameters that start at
    zero get values too."""
    model = library.model(attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.8 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def difference(own: PreTrainedModel, loaded: Architecture, seed: int = 0) -> float:
    """Return the greatest difference of log-probabilities [T, vocab] between a model's own forward
    and the engine's steps.

    The engine runs two prompts in random chunks in the same steps, then their other tokens one by
    one. A model with states has two forwards of its own, over all tokens at once and over one token
    at a time with its cache; they may differ, so the one nearer to the engine counts.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, loaded.config.vocab_size, (length,), generator=generator) for length in (LENGTH, OTHER)]
    found = _by_steps(Steps(loaded), [each.tolist() for each in tokens], generator)
    forwards = (whole, _cached) if loaded.state_layers else (whole,)
    wanted = [[forward(own, each) for each in tokens] for forward in forwards]
    return min(float((torch.cat(one) - torch.cat(found)).abs().max()) for one in wanted)


def whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return log-probabilities [T, vocab] after each token, from one forward of the model over all
    tokens."""
    with torch.no_grad():
        return torch.log_softmax(model(tokens[None], use_cache=False).logits[0].float(), dim=-1)


def _cached(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return log-probabilities [T, vocab]: half of the tokens in one forward, then one token at a
    time with the model's own cache."""
    half, found, kept = len(tokens) // 2, [], {}
    with torch.no_grad():
        for part in (tokens[:half], *tokens[half:].split(1)):
            out = model(part[None], use_cache=True, **kept)
            kept = {name: out[name] for name in ("past_key_values", "cache_params") if name in out}
            found.append(torch.log_softmax(out.logits[0].float(), dim=-1))
    return torch.cat(found)


def _by_steps(steps: Steps, tokens: list[list[int]], generator: torch.Generator) -> list[Tensor]:
    """Run the first half of each prompt in random chunks, then single tokens of both; return the
    log-probabilities [T, vocab] of each prompt. The prompt that finishes its half first waits;
    otherwise there would be few or no steps with single tokens of both."""
    found: list[list[Tensor]] = [[], []]
    done = [0, 0]
    while any(left := [len(own) // 2 - at for at, own in zip(done, tokens, strict=True)]):
        sizes = torch.randint(0, 9, (2,), generator=generator).tolist()
        _step(steps, tokens, done, found, [min(pair) for pair in zip(sizes, left, strict=True)])
    while any(at < len(own) for at, own in zip(done, tokens, strict=True)):
        _step(steps, tokens, done, found, [1, 1])
    return [torch.cat(own) for own in found]


def _step(
    steps: Steps,
    tokens: list[list[int]],
    done: list[int],
    found: list[list[Tensor]],
    sizes: list[int],
) -> None:
    given = {row + 1: tokens[row][done[row] : done[row] + size] for row, size in enumerate(sizes)}
    given = {slot: part for slot, part in given.items() if part}
    if not given:
        return
    hidden = steps.hidden(given)
    with torch.inference_mode():
        logprobs = torch.log_softmax(steps.runner.logits(hidden, None), dim=-1)
    for (slot, part), own in zip(given.items(), logprobs.split([len(part) for part in given.values()]), strict=True):
        found[slot - 1].append(own)
        done[slot - 1] += len(part)
