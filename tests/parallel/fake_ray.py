"""The part of Ray that places ranks: actors are objects of this process, and a call runs when its
result is requested."""

from __future__ import annotations

import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """The error that Ray raises for a lost actor."""


class Method:
    """A method of an actor; `remote` returns the method itself as the reference."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self) -> Method:
        return self


class Actor:
    """A started actor and its options."""

    def __init__(self, made: Any, options: dict[str, Any]) -> None:
        self.made, self.options, self.is_killed = made, options, False
        self.wait = Method(self, "wait")


class FakeRay:
    """A cluster. `has_room`: whether a placement group finds room; `lost`: the actors are gone with
    their machines; `is_joined`: this process is already part of it; `waits`: the seconds that each
    placement group was waited for."""

    def __init__(self, address: str = "127.0.0.1", has_room: bool = True) -> None:
        self.address, self.has_room, self.lost = address, has_room, False
        self.is_joined = False
        self.joined: list[str] = []
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.waits: list[float] = []
        self.actors: list[Actor] = []
        self.events: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Install a fake module `ray`; no other module may have imported the real one."""
        util = SimpleNamespace(
            get_node_ip_address=lambda: self.address,
            placement_group=self._group,
            remove_placement_group=lambda group: self.events.append("removed"),
        )
        module: Any = ModuleType("ray")
        module.__spec__, module.__path__ = ModuleSpec("ray", None), []
        module.util, module.exceptions = util, SimpleNamespace(RayError=RayError)
        module.is_initialized = lambda: self.is_joined
        module.init = lambda address, **options: self.joined.append(address)
        module.shutdown = lambda: self.events.append("left")
        module.cluster_resources = lambda: {"CPU": 1.0}
        module.remote, module.wait, module.get, module.kill = self._remote, self._wait, self._get, self._kill
        strategies: Any = ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
            placement_group_bundle_index
        )
        patch.setitem(sys.modules, "ray", module)
        patch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((bundles, strategy))

        def wait(timeout_seconds: float) -> bool:
            self.waits.append(timeout_seconds)
            return self.has_room

        return SimpleNamespace(wait=wait)

    def _remote(self, kind: Any) -> Any:
        def start(options: dict[str, Any], *given: Any) -> Actor:
            self.actors.append(Actor(kind(*given), options))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *given: start(options, *given)))

    def _wait(self, methods: list[Method], num_returns: int, timeout: float) -> tuple[list[Method], list[Method]]:
        if not 0 < num_returns <= len(methods):
            raise ValueError(f"num_returns is {num_returns} for {len(methods)} references, as in ray.wait")
        until = time.monotonic() + timeout
        while True:
            ended = [each for each in methods if self.lost or each.actor.made._process.poll() is not None]
            if len(ended) >= num_returns or time.monotonic() >= until:
                return ended[:num_returns], methods
            time.sleep(0.01)

    def _get(self, method: Method) -> Any:
        if self.lost:
            raise RayError("a long story\nThe actor died because its node has died.")
        return method.actor.made._process.wait()

    def _kill(self, actor: Actor) -> None:
        actor.is_killed = True
        actor.made._process.stdin.close()
