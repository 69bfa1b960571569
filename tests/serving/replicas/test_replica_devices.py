"""Each replica has its own devices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.device.choice import ChosenDevice
from sglcore.serving.replicas.engine_process import fingerprint
from sglcore.serving.replicas.replica_devices import devices_of
from tests.serving.staged_replicas import PATIENCE, staged


def choice(count: int, index: int = 0, *, is_host: bool = False) -> Any:
    """The choice of device `index` in a package with `count` devices (0: unknown)."""
    return SimpleNamespace(
        chosen=ChosenDevice("acme", "sglcore-acme", "1", 1, "", index),
        package=SimpleNamespace(name="acme", is_host=is_host),
        report=SimpleNamespace(devices=[object()] * count),
    )


def indices(found: Any, config: EngineConfig, **settings: Any) -> list[int]:
    """The first device of each replica."""
    return [ChosenDevice.decode(each).index for each in devices_of(found, config, ServerConfig(**settings))]


@pytest.mark.parametrize(
    ("count", "index", "tp", "replicas", "wanted"),
    [
        (8, 0, 4, 2, [0, 4]),
        (3, 0, 1, 3, [0, 1, 2]),
        (8, 2, 2, 3, [2, 4, 6]),
        (0, 0, 2, 3, [0, 2, 4]),
        (1, 0, 1, 1, [0]),
    ],
)
def test_replicas_have_devices_in_a_row_of_which_none_has_two(
    count: int, index: int, tp: int, replicas: int, wanted: list[int]
) -> None:
    assert indices(choice(count, index), EngineConfig(tp=tp), replicas=replicas) == wanted


@pytest.mark.parametrize(
    ("count", "index", "tp", "message"),
    [
        (1, 0, 1, "2 replicas need 2 devices, and 'acme' has 1, 1 of them from number 0 on.*--replicas 1"),
        (7, 0, 4, "2 replicas with 4 devices each need 8 devices, and 'acme' has 7.*--replicas 1"),
        (3, 2, 1, "need 2 devices, and 'acme' has 3, 1 of them from number 2 on.*--replicas 1,"),
        (3, 2, 2, "2 replicas with 2 devices each need 4 devices, and 'acme' has 3, 1 of them from.*--replicas 1,"),
    ],
)
def test_too_few_devices_are_refused_with_their_number(count: int, index: int, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        indices(choice(count, index), EngineConfig(tp=tp), replicas=2)


def test_replicas_share_a_processor_and_what_their_own_variables_show_them() -> None:
    assert indices(choice(1, is_host=True), EngineConfig(), replicas=3) == [0, 0, 0]
    assert indices(choice(1), EngineConfig(), replicas=2, replica_env=("CARD={index}",)) == [0, 0]
    assert indices(choice(2), EngineConfig(), replicas=2, replica_env=("MODE=fast",)) == [0, 1]


def test_each_engine_process_is_told_its_own_device_and_again_when_it_is_replaced() -> None:
    async def play() -> None:
        chosen = devices_of(choice(4), EngineConfig(tp=2), ServerConfig(replicas=2))
        async with staged(replicas=2, chosen=chosen) as stage:
            first, second = await stage.ready_engine(), await stage.ready_engine()
            assert [each.spec.chosen for each in (first, second)] == list(chosen)
            assert [each.spec.config["device"] for each in (first, second)] == [None, "acme:2"]
            second.die()
            assert (await stage.ready_engine()).spec.chosen == chosen[1]

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


def test_replicas_on_different_devices_of_a_kind_have_the_same_fingerprint(tmp_path: Any) -> None:
    rows = [[{"topic": "device", "effective": f"acme:{number}"}] for number in range(2)]
    assert len({fingerprint(tmp_path, "acme", ledger) for ledger in rows}) == 1  # pyright: ignore[reportArgumentType]
