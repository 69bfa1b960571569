"""An engine process: it receives requests from the frontend, runs the device's steps, and sends
replies. It does not tokenise.

Started as `python -m sglcore.serving.replicas.engine_process`, with an EngineSpec as one line of
JSON on its standard input. When standard input closes, the parent is gone and the process ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from sglcore.config.engine_config import EngineConfig, config_of_plain
from sglcore.core.errors import SglcoreError, WorkerLost, no_space
from sglcore.device.choice import ChosenDevice, adopt
from sglcore.device.discovery import discover
from sglcore.engine.checkpoint_digest import sample_of
from sglcore.engine.disaggregation.disaggregation_start import open_pages, settled
from sglcore.engine.metered_worker import Meter
from sglcore.engine.process_end import leave
from sglcore.engine.ranks.parent import end_with_parent
from sglcore.engine.start import Started, start
from sglcore.engine.structured_output.grammar_cache import Grammars, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.token_engine import TokenEngine
from sglcore.engine.tokenizers.skipped_tokenizer import open_codec
from sglcore.engine.tokenizers.text_codec import eos_token_ids
from sglcore.serving.replicas.channel import EngineChannel
from sglcore.serving.replicas.engine_service import EngineService
from sglcore.serving.replicas.heartbeat import Heartbeat
from sglcore.serving.replicas.ipc import EngineSpec, Failed, ModelInfo, Phase, Ready
from sglcore.serving.replicas.warm_up import warm_up

PARENT_GONE = 3
"""The exit code of a process after its parent ended without a message."""
LINK_BROKE = 4
"""The exit code of a process that lost its connection to the frontend: messages in transit may be
missing."""
REPLY_EVERY = 0.1
"""Seconds between two replies about one phase of the start."""


def main() -> int:
    """Run the engine that standard input describes until the frontend orders a shutdown, and return
    the exit code: 0, that of the error that ended it, or 1. SIGINT and SIGTERM are ignored: the
    frontend gets them. After WorkerLost, or a lost connection, the process ends here without
    returning."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the frontend gets it, drains and ends this process
    with open(0, "rb", closefd=False) as given:
        spec = msgspec.json.decode(given.readline(), type=EngineSpec)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s engine {spec.replica}: %(message)s")
    end_with_parent(PARENT_GONE)
    heartbeat = Heartbeat(spec.address)
    channel = EngineChannel(spec.address, lambda: os._exit(LINK_BROKE))
    try:
        service = start_service(spec, channel, heartbeat.count)
        code = service.run()
    except SglcoreError as error:
        channel.send(Failed(str(error), error.exit_code))
        code = error.exit_code
        if isinstance(error, WorkerLost):
            channel.close()
            os._exit(code)  # requests wait for this end; other hosts' ranks can not be asked now
    except Exception as error:
        full = no_space(error)
        logging.error("%s", full or traceback.format_exc())
        channel.send(Failed(full or f"{type(error).__name__}: {error}", 1))
        code = 1
    channel.close()
    heartbeat.close()
    return code


def start_service(spec: EngineSpec, channel: EngineChannel, on_round: Callable[[], object] = int) -> EngineService:
    """Start the model, generate a token by the path that will serve, and report to the frontend
    that the engine is ready. Returns the service; call its `run` next. `on_round` is called in each
    round of its loop. Raises SglcoreError for a start that fails."""
    config = settled(config_of_plain(spec.config), spec.pages)
    if spec.chosen:
        adopt(spec.chosen, config.device, discover())
    started = start(config, PhaseReplies(channel), ChosenDevice.decode(spec.chosen) if spec.chosen else None)
    meter = Meter(started.worker)
    eos_ids = eos_token_ids(started.model_path)
    grammars = _grammars(config, started, eos_ids)
    engine = TokenEngine(
        meter,
        eos_ids,
        overlap=started.overlap,
        prefix_cache=config.prefix_cache,
        shards=config.dp,
        open_grammars=lambda: grammars,
        open_pages=open_pages(spec.pages, started),
    )
    if engine.pages is not None:
        channel.watch(engine.pages.fileno())
    service = EngineService(engine, meter, channel, started.check, on_round)
    channel.send(Phase("warm-up", 0, 1))
    begin = time.perf_counter()
    warm_up(engine)
    seconds = {**started.seconds, "warm-up": time.perf_counter() - begin}
    channel.send(Ready(model_info(started, engine, seconds)))
    return service


def _grammars(config: EngineConfig, started: Started, eos_ids: frozenset[int]) -> Grammars | None:
    limits = started.worker.limits
    if not limits.generates:
        return None
    known = tuple(sorted(each for each in eos_ids if each < limits.vocab_size))
    codec = open_codec(started.model_path, skips=config.skip_tokenizer)
    vocabulary = Vocabulary(codec.tokenizer, limits.vocab_size, known)
    grammars, row = open_grammars(config.grammar_backend, vocabulary)
    started.ledger.record(row)
    return grammars


class PhaseReplies:
    """A progress callback that sends the progress of a start as replies (`Phase`): the first and
    the last state of each phase, and others at intervals of REPLY_EVERY seconds."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._phase = ""
        self._next = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a phase are complete; states between two intervals
        are dropped. Does not wait."""
        now = time.monotonic()
        if phase == self._phase and done != total and now < self._next:
            return
        self._phase, self._next = phase, now + REPLY_EVERY
        self._channel.send(Phase(phase, done, total))


def model_info(started: Started, engine: TokenEngine, seconds: dict[str, float]) -> ModelInfo:
    """Return the facts about the started engine, for the frontend. `seconds`: the duration of each
    step of the start, by name."""
    chosen, ledger = started.choice.chosen, started.ledger.as_json()
    return ModelInfo(
        device=str(chosen),
        device_evidence=started.choice.report.hardware.evidence,
        distribution=chosen.distribution,
        version=chosen.version,
        ledger=tuple(ledger),
        limits=asdict(engine.limits) | {"max_requests": engine.max_requests},
        max_model_len=engine.limits.max_model_len,
        generates=engine.limits.generates,
        eos_ids=tuple(sorted(engine.eos_ids)),
        seconds=seconds,
        fingerprint=fingerprint(started.model_path, f"{chosen.name} {chosen.distribution} {chosen.version}", ledger),
    )


def fingerprint(folder: Path, device: str, ledger: list[dict[str, object]]) -> str:
    """Return `fp_` and 12 hexadecimal digits for everything that may change a result: version,
    `device` (kind and package), the files in `folder` (or the one file that it is) by samples of
    their content, and the decisions in the ledger's rows. The device's index, the amount of memory,
    and a draft model that makes no draft tokens do not count."""
    from sglcore import __version__

    listed = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    files = [f"{file.name} {sample_of(file)}" for file in listed if file.is_file()]
    decisions = {str(row["topic"]): str(row["effective"]).partition(";")[0] for row in ledger}
    is_plain = decisions.get("speculative", "off") == "off"
    left_out = {name for name in decisions if name in ("kv cache", "device") or (is_plain and name.startswith("draft"))}
    chosen = [f"{name}={value}" for name, value in decisions.items() if name not in left_out]
    text = "\n".join([__version__, device, *files, *chosen])
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    leave(main())
