"""What the frontend makes of a request: what its engine is told, what counts as waiting, and which
prompts are too long."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.schedule.request_errors import ContextError
from sglcore.schedule.result_checks import longest_prompt
from sglcore.serving.replicas.engine_frontend import chat_template
from sglcore.serving.replicas.ipc import Abort, Embed, Refused, pack_ids, unpack_params
from sglcore.serving.replicas.metrics.server_metrics import CALLER
from sglcore.serving.replicas.server_errors import InvalidRequest, Overloaded
from sglcore.worker.model_worker import Limits
from tests.serving.replicas.test_frontend import PARAMS, PLACES, begin, staged_frontend
from tests.serving.staged_replicas import info, until


def test_a_request_goes_to_its_engine_as_it_was_asked_for() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            longest = info().max_model_len
            for prompt, most in (("once", 4), ("once", longest), ([5, 6, 7], longest - 3), ([5, 6, 7], longest - 2)):
                CALLER.set(f"caller {most}")
                params = replace(PARAMS, max_tokens=most, n=2)
                found = await frontend.generate(
                    prompt, params, special=False, progress=most == 4, request_id="mine", answer_id="answer"
                )
                ids = frontend.codec.encode(prompt, special=False) if isinstance(prompt, str) else prompt
                asked = await engine.next_request()
                assert (asked.request_id, asked.prompt, asked.progress) == ("mine", pack_ids(ids), most == 4)
                assert unpack_params(asked.params) == params
                assert (found.caller, found.answer_id, found.tries) == (f"caller {most}", "answer", 1)
                output, left = found.output, longest - len(ids)
                assert (output.prompt, output.prompt_token_ids) == (prompt if isinstance(prompt, str) else None, ids)
                assert output.max_tokens == (left if most > left else None)
                assert output.outputs[0].seed == asked.seed
                found.abort()
                assert await engine.requests.get() == Abort("mine")

    asyncio.run(play())


def test_requests_without_a_seed_and_an_id_each_get_their_own() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            begun = [await begin(frontend) for _ in range(4)]
            asked = [await engine.next_request() for _ in begun]
            assert len({each.seed for each in asked}) == len({each.request_id for each in asked}) == len(begun)
            for generation in begun:
                generation.abort()

    asyncio.run(play())


def test_who_is_refused_is_told_when_all_that_wait_will_have_ended() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=2, restart=True) as (frontend, stage):
            frontend.metrics.retry_after = lambda waiting: waiting
            engine = await stage.ready_engine()
            begun = await begin(frontend, PLACES + 1)
            with pytest.raises(Overloaded, match="3 samples would have to wait") as refused:
                await begin(frontend, 2)
            assert refused.value.retry_after == 3
            engine.die()
            await until(lambda: frontend.health.phase == "restarting")
            with pytest.raises(Overloaded, match=f"at most {PLACES} can run") as refused:
                await begin(frontend, 2)
            assert refused.value.retry_after == 3, "one replica is to come"
            begun.abort()

    asyncio.run(play())


def test_each_sample_of_a_prompt_that_is_read_or_waits_for_the_end_of_a_pause_is_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglcore.serving.replicas.engine_frontend.LONG_TEXT", 4)

    async def play() -> None:
        async with staged_frontend(max_queued_requests=2) as (frontend, stage):
            await stage.ready_engine()
            for is_paused in (False, True):
                if is_paused:
                    frontend._may_start.clear()
                prompt: Any = [5, 6, 7] if is_paused else "once upon a time"
                first = asyncio.ensure_future(frontend.generate(prompt, replace(PARAMS, n=PLACES + 2)))
                await asyncio.sleep(0)
                with pytest.raises(Overloaded):
                    await asyncio.wait_for(frontend.generate(prompt, PARAMS), 60)
                frontend._may_start.set()
                (await first).abort()
                assert frontend._open == 0

    asyncio.run(play())


def test_texts_to_embed_wait_like_samples_for_the_end_of_a_pause_and_make_room_when_they_fail() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=0) as (frontend, stage):
            engine = await stage.ready_engine(generates=False)
            frontend._may_start.clear()
            asking = asyncio.ensure_future(frontend.pooled([([5, 6], None)] * PLACES))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await asyncio.wait_for(frontend.pooled([([5, 6], None)]), 60)
            frontend._may_start.set()
            orders = [await asyncio.wait_for(engine.requests.get(), 60) for _ in range(PLACES)]
            assert frontend._open == PLACES
            for order in orders:
                assert isinstance(order, Embed)
                engine.say(Refused(order.request_id, "it does not fit"))
            with pytest.raises(InvalidRequest, match="it does not fit"):
                await asking
            assert frontend._open == 0

    asyncio.run(play())


@pytest.mark.parametrize("embeds", [False, True])
def test_a_prompt_is_held_to_the_limit_of_its_task(embeds: bool) -> None:
    async def play() -> None:
        limits = Limits(**info().limits)
        most = longest_prompt(limits, embeds=embeds)
        assert most != longest_prompt(limits, embeds=not embeds)
        async with staged_frontend() as (frontend, stage):
            await stage.ready_engine(generates=not embeds)
            assert frontend.longest_prompt(info(), embeds=embeds) == most
            with pytest.raises(ContextError, match=f"{most + 1} tokens"):
                ids = [5] * (most + 1)
                await (frontend.pooled([(ids, None)]) if embeds else frontend.generate(ids, PARAMS))
            assert frontend._open == 0

    asyncio.run(play())


def test_a_file_may_replace_the_chat_template_and_one_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "é.jinja"
    file.write_text("é{{ messages }}", encoding="utf-8")
    assert chat_template(ServerConfig(chat_template=str(file))) == "é{{ messages }}"
    assert chat_template(ServerConfig()) is None
    file.write_bytes(b"\xff")
    for path in (file, tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"chat_template {path} cannot be read: "):
            chat_template(ServerConfig(chat_template=str(path)))
