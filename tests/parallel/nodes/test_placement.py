"""Which of several launchers places a process, what restarts its nodes, and which interface has an
address."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.cli.serve import _placed as placed_server
from sglcore.config.engine_config import resolve_config, resolve_server_config
from sglcore.core.errors import ConfigError
from sglcore.engine.ranks import interface
from sglcore.engine.ranks.agreement import files_digest
from sglcore.engine.ranks.interface import interface_of
from tests.parallel.nodes.test_launch import TORCHRUN, WORKER_SET, placed

FIND = "sglcore.engine.ranks.rank_launch.find_spec"


@pytest.mark.parametrize(
    ("environ", "settings", "restarter"),
    [
        (TORCHRUN, {}, "torchrun, by --max-restarts"),
        (TORCHRUN, {"leader": "10.0.0.9:80"}, "torchrun, by --max-restarts"),
        (WORKER_SET, {}, "the LeaderWorkerSet, by its restartPolicy"),
        ({}, {"nodes": 2, "node_rank": 1, "leader": "a:1"}, ""),
        (TORCHRUN, {"nodes": 2, "leader": "ray"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_launcher_that_restarts_all_nodes_does_it_instead_of_the_server(
    environ: Mapping[str, str], settings: dict[str, Any], restarter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = placed(environ, **settings)
    assert found.restarter == restarter and found.row("auto").reason == found.reason
    assert found.row("auto", "by cable").reason == f"{found.reason}; by cable"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = resolve_config({"tp": 4, **settings}, {})
    server = resolve_server_config({"restart": True}, {})
    if not restarter:
        assert placed_server(config, server)[2].restart
        return
    with pytest.raises(ConfigError, match=f"--restart is given, and {restarter} starts all nodes again"):
        placed_server(config, server)
    assert not placed_server(config, resolve_server_config({}, {}))[2].restart


def test_of_two_launchers_the_one_that_started_the_process_places_it() -> None:
    """A pod of a LeaderWorkerSet may start several processes by torchrun."""
    assert placed({**WORKER_SET, **TORCHRUN}) == placed(TORCHRUN)
    assert placed({**WORKER_SET, **TORCHRUN, "WORLD_SIZE": "1"}) == placed(WORKER_SET)


def test_the_number_of_nodes_may_be_given_as_well_as_launched() -> None:
    assert placed(TORCHRUN, nodes=4) == placed(TORCHRUN) and placed(WORKER_SET, nodes=2) == placed(WORKER_SET)


@pytest.mark.parametrize("environ", [{}, TORCHRUN, WORKER_SET])
def test_ray_that_is_requested_places_the_nodes_whatever_started_this_process(environ: Mapping[str, str]) -> None:
    found = placed(environ, nodes=2, leader="ray:head:1")
    assert (found.launcher, found.nodes, found.node, found.cluster) == ("Ray", 2, 0, "head:1")


@pytest.mark.parametrize(
    ("environ", "cluster", "why"),
    [({"RAY_ADDRESS": "head:1"}, "head:1", "RAY_ADDRESS is set"), ({"RAY_ADDRESS": ""}, "auto", "Ray is installed")],
)
def test_ray_that_is_installed_starts_the_nodes_of_the_cluster_that_is_named(
    environ: Mapping[str, str], cluster: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIND, lambda name: object())
    found = placed(environ, nodes=2)
    assert found.cluster == cluster and found.reason.startswith(why)


def test_ray_that_is_installed_starts_nothing_where_a_leader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FIND, lambda name: object())
    with pytest.raises(ConfigError, match="nodes is 2, and the rank of this node is not known"):
        placed(nodes=2, leader="10.0.0.1:5")


def test_files_of_a_model_are_the_same_in_whatever_order_a_host_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "one.safetensors", "two.safetensors"):
        (tmp_path / name).write_text(name)
    files = list(tmp_path.iterdir())
    found: set[str] = set()
    for order in (files, files[::-1]):
        monkeypatch.setattr(Path, "iterdir", lambda folder, order=order: iter(order))
        found.add(files_digest(tmp_path))
    assert len(found) == 1 and len(found.pop()) == 12


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked of Linux")
def test_every_loopback_address_is_on_the_loopback_interface_and_an_interface_may_have_no_address() -> None:
    assert [interface_of(address) for address in ("127.0.0.1", "127.0.0.2", "127.9.9.9")] == ["lo"] * 3
    assert interface._ipv4_of("none7") is None and str(interface._ipv4_of("lo")) == "127.0.0.1"


def test_on_other_systems_no_interface_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "sys", SimpleNamespace(platform="darwin"))
    assert interface_of("127.0.0.1") is None and interface_of("::1") is None
