"""The loop of an engine process, over a real channel and a scripted device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from sglcore.engine.metered_worker import Meter
from sglcore.engine.structured_output.grammar_cache import Grammars
from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.channel import EngineChannel
from sglcore.serving.replicas.engine_service import MOST_FAILURES, EngineService
from sglcore.serving.replicas.ipc import (
    Able,
    Abort,
    Address,
    Audit,
    Done,
    Embed,
    Embedded,
    EngineOutputs,
    EngineReply,
    EngineRequest,
    EngineStats,
    Failed,
    Flush,
    GenerateRequest,
    Pause,
    Refused,
    Shutdown,
    pack_ids,
    pack_params,
)
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts

PATIENCE_MS = 120_000
LIMITS = Limits(64, 4, 4, 32, 16, 50, takes_masks=True)


class Counting:
    """A device that always samples token 7. `fails`: numbers of the steps that fail; `seconds`:
    duration of a step."""

    def __init__(self) -> None:
        self.limits = LIMITS
        self.fails: set[int] = set()
        self.seconds = 0.0
        self.swaps: SwapCounts | None = None
        self.submitted = 0
        self.closed = False

    def submit(self, batch: ScheduleBatch) -> Ticket:
        self.submitted += 1
        time.sleep(self.seconds)
        if self.submitted in self.fails:
            raise RuntimeError("planned")
        emits = np.asarray(batch.emits, dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(emits)]).astype(np.int32)
        tokens = np.full(int(emits.sum()), 7, dtype=np.int32)
        result = BatchResult(batch.step, offsets, tokens, np.zeros(len(emits), dtype=bool), swaps=self.swaps)
        return Ticket(batch.step, result)

    def collect(self, ticket: Ticket) -> BatchResult:
        assert isinstance(ticket.payload, BatchResult)
        return ticket.payload

    def close(self) -> None:
        self.closed = True


class Encoder(Counting):
    """A device that embeds and reports each step."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = replace(LIMITS, generates=False)
        self.on_step: Callable[[], object] = int

    def submit(self, batch: ScheduleBatch) -> Ticket:
        ticket = super().submit(batch)
        self.on_step()
        vectors = np.ones((len(batch.emits), 2), dtype=np.float32)
        assert isinstance(ticket.payload, BatchResult)
        return Ticket(batch.step, replace(ticket.payload, embeddings=vectors))


class Wanting(TokenEngine):
    """An engine that reports the lack that a test sets."""

    wants = ""

    @property
    def lacks(self) -> str:
        return self.wants


class Slow:
    """A grammar compiler that waits until the test releases it, then refuses."""

    name = "slow"
    vocabulary: Vocabulary

    def __init__(self) -> None:
        self.told = threading.Event()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.told.wait()
        raise GrammarError("no such grammar")


class Line:
    """The frontend's end: `say` sends a request, `hear` waits for the next reply of a kind."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(EngineReply)

    def say(self, order: EngineRequest) -> None:
        self._socket.send(msgspec.msgpack.encode(order))

    def generate(self, name: str, *, tokens: int = 3, grammar: Grammar | None = None, progress: bool = False) -> None:
        """Send a request with a prompt of three tokens."""
        params = SamplingParams(max_tokens=tokens, grammar=grammar)
        self.say(GenerateRequest(name, pack_ids([1, 2, 3]), pack_params(params), 0, progress))

    def hear(self, *kinds: type[Any]) -> Any:
        """Wait for the next reply of these kinds and skip others: an engine never stops sending its
        counters."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while True:
            assert self._socket.poll(PATIENCE_MS) and time.monotonic() < end, f"no {kinds} came"
            reply = self._decoder.decode(self._socket.recv())
            if isinstance(reply, kinds):
                return reply

    def last_outputs(self, *names: str) -> dict[str, EngineOutput]:
        """The last output of each of these requests."""
        found: dict[str, EngineOutput] = {}
        while set(found) != set(names):
            outputs: EngineOutputs = self.hear(EngineOutputs)
            found |= {each.request_id: each for each in outputs.items if each.finish_reason is not None}
        return found

    def numbers(self, name: str, value: int) -> EngineStats:
        """The engine's counters, once `name` has this value."""
        while True:
            stats: EngineStats = self.hear(EngineStats)
            if getattr(stats, name) == value:
                return stats


class Served:
    """A service in a thread. `end` waits for its exit code."""

    def __init__(self, folder: Path, device: Counting, compiler: Slow, engine: type[TokenEngine] = TokenEngine) -> None:
        self.device, self.compiler = device, compiler
        context = zmq.Context.instance()
        socket = context.socket(zmq.PAIR)
        socket.bind(f"ipc://{folder}/engine")
        self.line = Line(socket)
        self._socket = socket
        self.channel = EngineChannel(Address(f"ipc://{folder}/engine"))
        grammars = Grammars(compiler)
        meter = Meter(device)
        self.engine = engine(meter, frozenset(), overlap=True, open_grammars=lambda: grammars)
        service = EngineService(self.engine, meter, self.channel)
        self.codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.codes.append(service.run()))
        self._thread.start()

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        self._thread.join(PATIENCE_MS / 1000)
        return self.codes[0]

    def close(self) -> None:
        self.compiler.told.set()
        self.line.say(Shutdown())
        self._thread.join(PATIENCE_MS / 1000)
        self.channel.close()
        self._socket.close(0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path, Counting(), Slow())
    yield found
    found.close()


def test_a_request_is_told_of_all_its_tokens_and_leaves_nothing_behind(served: Served) -> None:
    served.line.generate("r", tokens=5)
    assert served.line.last_outputs("r")["r"].finish_reason == "length"
    stats = served.line.numbers("running", 0)
    assert (stats.requests, stats.prompt_tokens, stats.generation_tokens, stats.failed_steps) == (1, 3, 5, 0)
    assert stats.swap_rows == stats.swap_waits == 0


def test_what_came_of_rows_in_host_memory_is_summed_over_steps(served: Served) -> None:
    served.device.swaps = SwapCounts(16, 12, 400, 100, 1)
    served.line.generate("r", tokens=5)
    served.line.last_outputs("r")
    stats = served.line.numbers("running", 0)
    told = stats.swap_rows, stats.swap_hits, stats.loaded_bytes, stats.stored_bytes, stats.swap_waits
    assert told == tuple(count * served.device.submitted for count in (16, 12, 400, 100, 1))
    served.line.say(Audit("a"))
    assert served.line.hear(Done).problems == []
    served.line.say(Shutdown())
    assert served.end() == 0 and served.device.closed


def test_a_paused_engine_runs_no_step_and_an_abort_ends_what_it_holds(served: Served) -> None:
    # Outputs before the pause are skipped by `hear`.
    served.device.seconds = 0.02
    served.line.generate("runs", tokens=50)
    served.line.hear(EngineOutputs)
    served.line.say(Pause("p", True))
    served.line.hear(Done)
    before = served.device.submitted
    served.line.generate("waits")
    served.line.generate("left")
    served.line.say(Abort("left"))
    assert served.line.last_outputs("left")["left"].finish_reason == "abort"
    assert served.device.submitted == before
    served.line.say(Pause("p", False))
    ends = served.line.last_outputs("runs", "waits")
    assert {each.finish_reason for each in ends.values()} == {"length"}
    served.line.say(Flush("f"))
    assert served.line.hear(Done).pages > 0
    served.line.say(Audit("a"))
    assert served.line.hear(Done).problems == []


def test_what_can_not_run_is_refused_by_name(served: Served) -> None:
    served.line.say(GenerateRequest("long", pack_ids([1] * 64), {}, 0))
    served.line.say(GenerateRequest("odd", pack_ids([1]), {"temperature": -1.0}, 0))
    refusals = [served.line.hear(Refused) for _ in range(2)]
    assert [each.request_id for each in refusals] == ["long", "odd"]
    assert "64" in refusals[0].error and "temperature" in refusals[1].error


def test_a_step_that_fails_ends_its_requests_with_the_error_and_the_next_ones_are_answered(served: Served) -> None:
    served.device.fails = {2}
    served.line.generate("lost")
    lost = served.line.last_outputs("lost")["lost"]
    assert lost.finish_reason == "error" and "planned" in lost.error
    served.line.generate("next")
    assert served.line.last_outputs("next")["next"].finish_reason == "length"
    assert served.line.numbers("failed_steps", 1).running == 0
    served.line.say(Audit("a"))
    assert served.line.hear(Done).problems == []


def test_a_device_that_fails_again_and_again_ends_the_process_and_failures_apart_do_not(served: Served) -> None:
    served.device.fails = {1, 2, 4, 5}
    for name in ("a", "b", "c", "d", "e", "f"):
        served.line.generate(name, tokens=1)
        served.line.last_outputs(name)
    served.device.fails = set(range(1000))
    for name in range(MOST_FAILURES):
        served.line.generate(f"f{name}")
        served.line.last_outputs(f"f{name}")
    failed: Failed = served.line.hear(Failed)
    assert failed.exit_code == 1 and str(MOST_FAILURES) in failed.error
    assert served.end() == 1


def test_an_embedding_that_is_in_flight_when_the_engine_is_paused_is_told_before_it(tmp_path: Path) -> None:
    device, begun = Encoder(), threading.Event()
    served = Served(tmp_path, device, Slow())

    def hold() -> None:
        """Hold the step until the next order has arrived."""
        begun.set()
        served.channel._socket.poll(PATIENCE_MS)

    try:
        device.on_step = hold
        served.line.say(Embed("e", pack_ids([1, 2])))
        begun.wait()
        served.line.say(Pause("p", True))
        found = [served.line.hear(Embedded, Done) for _ in range(2)]
        assert [each.request_id for each in found] == ["e", "p"] and not found[0].error
        device.on_step = int
        served.line.say(Embed("left", pack_ids([1, 2])))
        served.line.say(Abort("left"))
        served.line.say(Pause("q", False))
        served.line.say(Embed("next", pack_ids([1, 2])))
        assert served.line.hear(Embedded).request_id == "next" and device.submitted == 2
    finally:
        served.close()


def test_waiting_for_a_compiler_is_no_step_and_an_abort_ends_the_wait(served: Served) -> None:
    served.line.generate("bound", grammar=Grammar("regex", "a"))
    served.line.generate("left", grammar=Grammar("regex", "a"))
    served.line.numbers("compiling", 2)
    served.line.say(Abort("left"))
    assert served.line.last_outputs("left")["left"].finish_reason == "abort"
    stats = served.line.numbers("compiling", 1)
    assert (stats.host_steps, stats.step_seconds, stats.steps) == (0, 0.0, 0)
    served.compiler.told.set()
    bound = served.line.last_outputs("bound")["bound"]
    assert bound.refused and "no such grammar" in bound.error


def test_what_an_engine_lacks_is_told_once_as_often_as_it_changes_and_so_is_that_it_lacks_nothing(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path, Counting(), Slow(), Wanting)
    assert isinstance(served.engine, Wanting)
    try:
        for lacks in ("no prompt engine", "another", "", "no prompt engine", ""):
            served.engine.wants = lacks
            told = list[str]()
            for _ in range(3):  # at least one round of the loop between two answers
                served.line.say(Audit("a"))
                while isinstance(reply := served.line.hear(Able, Done), Able):
                    told.append(reply.lacks)
            assert told == [lacks]
    finally:
        served.close()
