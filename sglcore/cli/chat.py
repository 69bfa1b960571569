"""The command `sglcore chat`: a conversation on the terminal, with a model in this process or on a
server."""

from __future__ import annotations

import io
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglcore.cli import options
from sglcore.cli.setting_flags import engine_settings
from sglcore.cli.wrap import Writer
from sglcore.core.errors import ConfigError, SglcoreError

if TYPE_CHECKING:
    from sglcore.cli.chat_source import Source
    from sglcore.engine.tokenizers.chat_template import Message

HELP = """\
/clear         forget the conversation
/system TEXT   this system prompt from now on; without TEXT, none
/help          this text
/quit          leave; so do Ctrl-D, and Ctrl-C twice
//TEXT         send a message that begins with a /
Ctrl-C stops an answer; its text so far stays in the conversation."""


def chat(
    model: options.ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Chat with this server instead, such as http://127.0.0.1:8000. An error with MODEL and engine flags."
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            help="API key of the server. No effect without --url.", envvar="SGLCORE_API_KEY", show_envvar=True
        ),
    ] = "",
    model_name: Annotated[
        str | None,
        typer.Option(help="Model name on the server; default: the first one. No effect without --url."),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of output tokens; default: what the context length allows.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, 0 is greedy; default: the checkpoint's, or 1.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens whose probabilities add up to this (nucleus sampling); default:"
            " the checkpoint's, or 1, which is off."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed; makes every answer reproducible. Default: a new one for each answer."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answers.")] = False,
    verbose: options.Verbose = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Chat with a model. Each line is a message; /help lists the commands. Answers go to standard
    output; banner, statistics and errors go to standard error."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    fields = {name: value for name, value in given.items() if value is not None}
    here = engine_settings(settings)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a mark
    with ExitStack() as stack:
        if url is None:
            source = _local(stack, model, here, fields, quiet=quiet, verbose=verbose)
        else:
            _refuse_local(model, here)
            source = _server(url, api_key, model_name, fields, quiet=quiet)
        talk(Conversation(source, system, is_quiet=quiet))


def _local(
    stack: ExitStack,
    model: str | None,
    settings: dict[str, Any],
    fields: dict[str, Any],
    *,
    quiet: bool,
    verbose: bool,
) -> Source:
    from sglcore.cli.banner import show_banner
    from sglcore.cli.chat_source import LocalSource
    from sglcore.engine.llm import LLM
    from sglcore.sampling.params import SamplingError, SamplingParams

    given = {"max_tokens": None, **fields}
    try:
        SamplingParams(**given)
    except SamplingError as error:
        raise ConfigError(str(error)) from None
    llm = stack.enter_context(LLM(model, show_progress=not quiet, **{"max_requests": 1, **settings}))
    if not quiet:
        show_banner(llm.started, verbose=verbose)
    return LocalSource(llm, replace(llm.default_params, **given))


def _server(url: str, key: str, name: str | None, fields: dict[str, Any], *, quiet: bool) -> Source:
    from sglcore.bench.address import address, served_model
    from sglcore.cli.chat_source import ServerSource

    where = address(url, key)
    name = name or served_model(where)
    if not quiet:
        print(f"{name} at {where}\n", file=sys.stderr)
    return ServerSource(where, {"model": name, **fields})


def _refuse_local(model: str | None, settings: dict[str, Any]) -> None:
    """Raise ConfigError if MODEL or an engine setting is given with --url.

    A server has its own model and settings, and these would have no effect.
    """
    given = [f"--{name.replace('_', '-')}" for name in settings]
    given = [*(["MODEL"] if model is not None else []), *given]
    if given:
        raise ConfigError(
            f"--url was given with {', '.join(given)}",
            wanted="one or the other: the server has a model and a device of its own",
            remedy="leave --url out, or use --model-name to choose among the server's models",
        )


@dataclass(slots=True)
class Conversation:
    """The messages so far, and where the answers come from.

    `turns` has the messages of the user and of the model, without the system prompt. An empty
    `system` is none. With `is_quiet` only answers are printed. `has_failed` says whether any turn
    ended with an error. `out` prints the answers.
    """

    source: Source
    system: str
    is_quiet: bool = False
    turns: list[Message] = field(default_factory=list)
    has_failed: bool = False
    out: Writer = field(default_factory=Writer)

    @property
    def messages(self) -> list[Message]:
        """The messages for the model, a new list: the system prompt, if there is one, and the
        turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]


class Interrupts:
    """Context manager for one answer of `source`: inside it, the first Ctrl-C stops the answer
    (`source.stop`), and a further one raises KeyboardInterrupt; afterwards the previous handler is
    back.

    `is_stopped` says whether the answer was stopped. Must be entered in the main thread.
    """

    def __init__(self, source: Source) -> None:
        self.is_stopped = False
        self._source = source
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopped:
            raise KeyboardInterrupt
        self.is_stopped = True
        self._source.stop()


def talk(conversation: Conversation) -> None:
    """Read messages from standard input and print answers until the input ends or /quit; blocks.
    An empty line is skipped; one with "/" first is a command, and one with "//" first a message
    without the first "/".

    Errors of an answer are printed on the error stream, and the conversation continues. If the
    input is not a terminal, an error in any turn raises `typer.Exit` with the error's exit code at
    the end.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (lines can be edited and called back)
    if is_terminal and not conversation.is_quiet:
        print("/help lists the commands; Ctrl-D leaves.", file=sys.stderr)
    while (line := _read(is_terminal)) is not None:
        if line.partition(" ")[0] == "/quit":
            break
        if line.startswith("/") and not line.startswith("//"):
            _command(conversation, line)
        elif line:
            _answer(conversation, line.removeprefix("/"))
    if conversation.has_failed and not is_terminal:
        raise typer.Exit(SglcoreError.exit_code)


def _read(is_terminal: bool) -> str | None:
    """Return the next line of input, stripped (it may be empty), or None at the end of the input.

    At a terminal, Ctrl-C discards the line. A second Ctrl-C, or the first without a terminal,
    raises `typer.Exit` with code 130.
    """
    was_interrupted = False
    while True:
        try:
            return input("\n> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                _say("")
            return None
        except KeyboardInterrupt:
            if was_interrupted or not is_terminal:
                raise typer.Exit(130) from None
            was_interrupted = True
            _say("\nCtrl-C once more leaves, as Ctrl-D does")


def _command(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/clear":
        conversation.turns.clear()
        _say("the conversation is forgotten")
    elif name == "/system":
        conversation.system = rest.strip()
        _say(f"system prompt: {conversation.system or 'none'}")
    elif name == "/help":
        _say(HELP)
    else:
        _say(f"there is no command {name}; /help lists them, and //{line[1:]} sends it as a message")


def _answer(conversation: Conversation, text: str) -> None:
    """Send a message, print the answer, and add both to the conversation, the answer without its
    reasoning.

    A message without any text in answer (reasoning does not count) is removed from the
    conversation. Errors of the source are printed on the error stream, not raised; the part of an
    answer that came before one is kept. Ctrl-C stops the answer; a second one raises `typer.Exit`.
    """
    from sglcore.cli.chat_source import ContextFull

    conversation.turns.append({"role": "user", "content": text})
    spoken: list[str] = []
    try:
        with Interrupts(conversation.source) as interrupts:
            figures = _print_answer(conversation, spoken)
    except KeyboardInterrupt:
        conversation.out.write("\n")
        raise typer.Exit(130) from None
    except (SglcoreError, ValueError) as error:
        conversation.out.write("\n" if spoken else "")
        is_full = isinstance(error, ContextFull) and len(conversation.turns) > 1
        _say(f"error: {error}{'; /clear forgets the conversation so far' if is_full else ''}")
        conversation.has_failed, figures = True, ""
    if spoken:
        conversation.turns.append({"role": "assistant", "content": "".join(spoken)})
    else:
        conversation.turns.pop()
    if figures and not conversation.is_quiet:
        _say(f"[{figures}{', stopped' if interrupts.is_stopped else ''}]")


def _print_answer(conversation: Conversation, spoken: list[str]) -> str:
    """Print the answer as it arrives, reasoning included, and add its pieces of text to `spoken`,
    without the reasoning.

    Returns, without printing it, a line with the number of tokens, the time to the first text, and
    the rate; "no text" if there was none.
    """
    begin = time.perf_counter()
    times: list[float] = []
    tokens = pieces = 0
    was_reasoning = False
    for part in conversation.source.stream(conversation.messages):
        tokens += part.tokens
        if not part.text:
            continue
        times[1:] = [time.perf_counter()]
        pieces += 1
        if part.is_reasoning != was_reasoning:
            conversation.out.write("(thinks) " if part.is_reasoning else "\n\n")
        was_reasoning = part.is_reasoning
        conversation.out.write(part.text)
        if not part.is_reasoning:
            spoken.append(part.text)
    conversation.out.write("\n")
    count = f"{tokens} tokens" if tokens else f"{pieces} pieces of text"
    speed = (tokens or pieces) - 1
    span = times[-1] - times[0] if times else 0.0
    rate = f", {speed / span:.1f} {'tokens' if tokens else 'pieces'}/s" if speed > 0 and span > 0 else ""
    return f"{count}, first after {(times[0] - begin) * 1000:.0f} ms{rate}" if times else "no text"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
