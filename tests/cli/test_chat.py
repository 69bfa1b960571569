"""`sglcore chat`: the messages sent, the text printed and the effect of Ctrl-C, with the embedded
model and with a scripted server."""

from __future__ import annotations

import io
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import Any, cast

import pytest
import typer
from rich.cells import cell_len

from sglcore import LLM, SamplingParams
from sglcore.bench.address import address
from sglcore.cli.__main__ import main
from sglcore.cli.chat import Conversation, talk
from sglcore.cli.chat_source import LocalSource, Part, ServerSource
from sglcore.cli.wrap import Writer, wrapped
from sglcore.engine.tokenizers.chat_template import Message
from tests.serving.page_server import Script, chat, ended, make_app, usage
from tests.serving.threaded import in_thread


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Script, str]]:
    script = Script()
    with in_thread(make_app(script)) as address:
        yield script, address


@pytest.fixture
def script(served: tuple[Script, str]) -> Script:
    fresh = Script()
    for item in fields(Script):
        setattr(served[0], item.name, getattr(fresh, item.name))
    return served[0]


@dataclass
class Scripted:
    """A source that repeats one text for ever and sends Ctrl-C after `interrupts` parts."""

    interrupts: int = 0
    obeys: bool = True
    stops: int = 0
    received: list[list[Message]] = field(default_factory=list)

    def stream(self, messages: Sequence[Message]) -> Iterator[Part]:
        self.received.append(list(messages))
        for place, text in enumerate(repeat("so ")):
            yield Part(text, 1)
            if place < self.interrupts:
                signal.raise_signal(signal.SIGINT)
            if place >= self.interrupts or (self.obeys and self.stops):
                return

    def stop(self) -> None:
        self.stops += 1


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_embedded_model_answers_and_the_figures_go_to_the_error_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "Hello")
    assert main(("chat", "--temperature", "0", "--max-tokens", "6", "--max-model-len", "256")) == 0
    seen = capsys.readouterr()
    assert seen.out.strip() and "tokens" not in seen.out
    assert "[6 tokens, first after" in seen.err and "kv cache" in seen.err


def test_a_conversation_is_sent_as_a_whole_and_commands_change_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[Script, str],
    script: Script,
) -> None:
    script.chunks = [chat(reasoning_content="Hm."), chat("Hi "), chat("there"), ended("stop"), usage(3, 5)]
    type_in(monkeypatch, "one", "/system Be kind.", "//two", "", "/clear", "/what", "three", "/quit", "never")
    assert main(("chat", "--url", f"{served[1]}/v1", "--temperature", "0.5", "--seed", "7", "--api-key", "k")) == 0
    said = [[(message["role"], message["content"]) for message in received["messages"]] for received in script.received]
    kind = ("system", "Be kind.")
    assert said == [
        [("user", "one")],
        [kind, ("user", "one"), ("assistant", "Hi there"), ("user", "/two")],
        [kind, ("user", "three")],
    ]
    first = script.received[0]
    assert (first["model"], first["temperature"], first["seed"]) == ("small", 0.5, 7) and "top_p" not in first
    assert set(script.keys) == {"Bearer k"}
    seen = capsys.readouterr()
    assert seen.out.splitlines()[:3] == ["(thinks) Hm.", "", "Hi there"]
    assert "5 tokens" in seen.err and "no command /what" in seen.err


def test_a_message_that_is_refused_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[Script, str],
    script: Script,
) -> None:
    script.refusal = (400, {"error": {"message": "found 9000 tokens; wanted 1024"}})
    type_in(monkeypatch, "long", "longer")
    assert main(("chat", "--url", served[1])) == 2
    assert [len(received["messages"]) for received in script.received] == [1, 1]
    assert "answered 400: found 9000 tokens; wanted 1024" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[Script, str],
    script: Script,
) -> None:
    type_in(monkeypatch, "short", "long " * 300, "/clear", "short")
    words = ("chat", "-q", "--max-model-len", "256", "--max-tokens", "4", "--temperature", "0")
    assert main(words) == 2
    seen = capsys.readouterr()
    (refused,) = [line for line in seen.err.splitlines() if line.startswith("error")]
    assert "the context holds 256" in refused and refused.endswith("; /clear forgets the conversation so far")
    first, second = seen.out.splitlines()
    assert first == second
    script.chunks = [chat("Hi"), ended("stop")]
    source = ServerSource(address(served[1]), {"model": "small"})
    conversation = Conversation(
        source, "", turns=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    script.refusal = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    type_in(monkeypatch, "c")
    with pytest.raises(typer.Exit):
        talk(conversation)
    assert "too long; /clear forgets" in capsys.readouterr().err


class Opening:
    """An address whose connection is stopped while it opens; `sock` is then its socket."""

    sock = None

    def __init__(self) -> None:
        self.source = ServerSource(cast("Any", self), {})

    def connect(self, timeout: float | None = None) -> Opening:
        self.source.stop()
        return self

    def request(self, *parts: object) -> None:
        raise AssertionError("a stopped request is not sent")

    def close(self) -> None:
        pass


def test_a_stop_while_the_connection_opens_sends_nothing() -> None:
    assert list(Opening().source.stream([{"role": "user", "content": "a"}])) == []


@pytest.mark.parametrize(("is_cut", "said"), [(True, "before the answer was whole"), (False, "the engine died")])
def test_a_stream_that_breaks_off_is_an_error_and_what_came_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[Script, str],
    script: Script,
    is_cut: bool,
    said: str,
) -> None:
    script.chunks, script.is_cut = [chat("half")], is_cut
    if not is_cut:
        script.chunks.append({"error": {"message": "the engine died"}})
    type_in(monkeypatch, "one", "two")
    assert main(("chat", "--url", served[1])) == 2
    assert said in capsys.readouterr().err
    assert script.received[1]["messages"][1] == {"role": "assistant", "content": "half"}


def test_an_interrupt_stops_the_answer_at_the_server_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[Script, str],
    script: Script,
) -> None:
    script.chunks, script.hold = [chat("Once upon")], True
    pressed = threading.Event()

    class Watched(io.StringIO):
        """Presses Ctrl-C once the text has been printed; as in a terminal, the main thread gets the
        signal."""

        def write(self, text: str) -> int:
            if "Once upon" in text and not pressed.is_set():
                pressed.set()
                main_thread = threading.main_thread().ident
                assert main_thread is not None
                threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Watched())
    type_in(monkeypatch, "Tell", "/help")
    assert main(("chat", "--url", served[1])) == 0
    assert script.left.wait(10)
    seen = capsys.readouterr().err
    assert "stopped" in seen and "/system TEXT" in seen and "error" not in seen


def test_the_first_interrupt_stops_and_the_second_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    obedient = Scripted(interrupts=1)
    type_in(monkeypatch, "a", "b")
    talk(Conversation(obedient, ""))
    assert obedient.stops == 2 and [message["content"] for message in obedient.received[1]] == ["a", "so ", "b"]
    stubborn = Scripted(interrupts=2, obeys=False)
    type_in(monkeypatch, "a", "never asked")
    with pytest.raises(typer.Exit) as end:
        talk(Conversation(stubborn, ""))
    assert end.value.exit_code == 130 and len(stubborn.received) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_words_that_reach_the_edge_are_taken_to_the_next_line_as_a_whole() -> None:
    text, width = "one two three\nfour 世界世界 fivesixseveneight nine", 9
    sent = wrapped(Writer(), text, width)
    rows, column = [[" "] * width], 0
    for part in re.findall(r"\x1b\[(\d+)D\x1b\[K|([^\x1b])", sent):
        if part[0]:  # at the edge the cursor is on the last character
            column = min(column, width - 1) - int(part[0])
            rows[-1][column:] = [" "] * (width - column)
        elif part[1] == "\n" or column + cell_len(part[1]) > width:
            rows.append([" "] * width)
            column = 0
        if part[1] not in ("", "\n"):
            rows[-1][column : column + cell_len(part[1])] = [part[1], *[""] * (cell_len(part[1]) - 1)]
            column += cell_len(part[1])
    shown = ["".join(row).rstrip() for row in rows]
    assert shown == ["one two", "three", "four 世界", "世界", "fivesixse", "veneight", "nine"]


def test_an_interrupt_takes_back_a_line_and_a_second_one_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, size: int | None = -1, /) -> str:
            line = super().readline()
            if line == "^C\n":
                raise KeyboardInterrupt
            return line

    source = Scripted()
    monkeypatch.setattr("sys.stdin", Typed("^C\n/help\n^C\n^C\nnever\n"))
    with pytest.raises(typer.Exit) as end:
        talk(Conversation(source, ""))
    assert end.value.exit_code == 130 and source.received == []
    assert capsys.readouterr().err.count("once more") == 2


def test_a_stopped_answer_leaves_nothing_in_the_engine() -> None:
    with LLM(max_requests=1, max_model_len=256) as llm:
        source = LocalSource(llm, SamplingParams(max_tokens=200, ignore_eos=True))
        parts = source.stream([{"role": "user", "content": "Hello"}])
        next(parts)
        source.stop()
        assert list(parts) == []
        assert not llm.engine.has_work
        assert sum(part.tokens for part in source.stream([{"role": "user", "content": "Hi"}])) == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "http://127.0.0.1:9", "--model-name", "x"), "cannot be reached"),
        (("--url", "ftp://here"), "wanted http:// or https://"),
        (("--url", "http://127.0.0.1:9", "--device", "acme", "--threads", "2"), "--device, --threads"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_what_can_not_work_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    type_in(monkeypatch, "hello")
    code = main(("chat", "-q", *words))
    seen = capsys.readouterr().err
    assert said in seen and seen.count("\n") == 1 and seen.startswith("error: ")
    assert code == 2
