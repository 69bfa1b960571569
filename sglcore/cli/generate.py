"""The command `sglcore generate`: completes one prompt on the terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglcore.cli import options
from sglcore.cli.setting_flags import engine_settings
from sglcore.core.errors import ConfigError, SglcoreError

if TYPE_CHECKING:
    from sglcore.engine.llm import LLM
    from sglcore.engine.outputs import Completion
    from sglcore.sampling.params import SamplingParams


def generate(
    model: options.ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help='Text to complete; "-" reads standard input. Default: standard input, unless it is a terminal.',
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat the prompt as a chat message of the user, in the checkpoint's chat template."
        ),
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of output tokens.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            help="Sampling temperature; 0 is greedy: --top-k, --top-p, --min-p and --seed then have no effect."
        ),
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the most likely tokens whose probabilities add up to this (nucleus sampling); 1 is off."
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens whose probability is below this fraction of the most likely one's; 0 is off."),
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Random seed; default: a new one, which is printed.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the generated text.")] = False,
    verbose: options.Verbose = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Complete a prompt and stream the text to standard output, after the prompt itself (not with
    --chat or --quiet); banner and statistics go to standard error."""
    params = _params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    text = _text(prompt, model)
    from sglcore.cli.banner import show_banner
    from sglcore.engine.llm import LLM

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a mark
    with LLM(model, show_progress=not quiet, **{"max_requests": 1, **engine_settings(settings)}) as llm:
        if not quiet:
            show_banner(llm.started, verbose=verbose)
        _complete(llm, text, params, chat=chat, quiet=quiet)


def _text(prompt: str | None, model: str | None) -> str:
    """Return the prompt; "-" reads standard input to its end, and so does None if standard input is
    not a terminal.

    Raises ConfigError if there is no prompt and no input, or if `model` looks like a prompt:
    several words, and no such file.
    """
    if model is not None and len(model.split()) > 1 and not Path(model).exists():
        raise ConfigError(f"there is no model {model!r}", remedy="give the text to complete with --prompt")
    is_open = prompt is None and not sys.stdin.isatty()
    text = sys.stdin.read() if prompt == "-" or is_open else prompt
    if prompt is None and not text:
        raise ConfigError("there is no prompt", wanted="--prompt TEXT, or a text on standard input")
    return text or ""


def _params(**values: object) -> SamplingParams:
    from sglcore.sampling.params import SamplingError, SamplingParams

    try:
        return SamplingParams(**values)  # pyright: ignore[reportArgumentType]
    except SamplingError as error:
        raise ConfigError(str(error)) from None


def _complete(llm: LLM, text: str, params: SamplingParams, *, chat: bool, quiet: bool) -> None:
    ids = llm.chat_prompt([{"role": "user", "content": text}]) if chat else llm.prompt(text)
    begin = time.perf_counter()
    first = begin
    if not chat and not quiet:
        _write(text)
    output = llm.engine.add(ids, params)
    try:
        while not output.finished:
            for delta in llm.engine.step():
                first = time.perf_counter() if first == begin else first
                _write(delta.text)
    except KeyboardInterrupt:
        llm.engine.abort(output.request_id)
        _write("\n")
        raise typer.Exit(130) from None
    _write("\n")
    if not quiet:
        _figures(output.outputs[0], len(ids), first - begin, time.perf_counter() - first)
    if error := output.outputs[0].error:
        raise SglcoreError(error)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _figures(completion: Completion, prompt_tokens: int, first: float, rest: float) -> None:
    count = len(completion.token_ids)
    speed = f"{(count - 1) / rest:.1f} tokens/s" if count > 1 and rest > 0 else "one token"
    cause = f" ({completion.stop_cause!r})" if isinstance(completion.stop_cause, str) else ""
    line = (
        f"{prompt_tokens} prompt tokens, first token after {first * 1000:.0f} ms; {count} tokens, {speed}; "
        f"ended by {completion.finish_reason}{cause}; seed {completion.seed}"
    )
    print(f"\n{line}", file=sys.stderr)
