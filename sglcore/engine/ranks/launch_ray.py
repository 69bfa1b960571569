"""Other hosts by Ray: a placement group with one bundle on each host, and in each bundle an actor
that starts a node as its child process.

Ray places the actors and reports their ends; all messages use our own channels. Replicas use the
functions for clusters and actors here too.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sglcore.core.errors import ConfigError, WorkerLost

OBJECT_STORE_BYTES = 128 << 20
"""Bytes of the object store of a cluster that is started here: nothing large is sent through
Ray."""
HEAD_SECONDS = 5.0
"""Seconds after which a cluster's head that does not accept a connection is reported as missing."""
ENDING = 5.0
"""Seconds that nodes have to end by themselves before their actors are killed."""
NODE = "sglcore.engine.ranks.host_process"
PINNED = 0.001
"""Amount of Ray's per-host resource that a bundle requests to be placed on that host."""


class ChildActor:
    """A Ray actor that runs one process as its child. The child ends when the actor does, because
    its standard input closes."""

    def __init__(self, module: str, spec: bytes, variables: Mapping[str, str]) -> None:
        """Start `python -m module` with `spec`, which ends with a newline, on its standard input,
        and with `variables` in addition to this process's environment."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(spec)
        self._process.stdin.flush()

    def place(self) -> tuple[str, int]:
        """Return the address of the actor's machine and the process id of the child."""
        return ray_module().util.get_node_ip_address(), self._process.pid

    def wait(self) -> int:
        """Return the child's exit code; waits until it has ended. Negative: the signal that ended
        it."""
        return self._process.wait()


class RayHosts:
    """A placement group with bundles on `nodes` hosts of a Ray cluster, this host among them, and
    an actor in the bundle of each other host. `address`: this host's. Ray runs on a thread of our
    own: on the main thread it would handle SIGTERM itself."""

    def __init__(self, cluster: str, nodes: int, bundle: Mapping[str, float]) -> None:
        """`cluster`: the address of its head, auto or local; `bundle`: the resources of each host.
        Waits for the cluster. Raises ConfigError if it cannot be joined."""
        check_installed()
        self._nodes, self._bundle = nodes, dict(bundle)
        self._group: Any = None
        self._actors: list[Any] = []
        self._ends: list[Any] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        try:
            self._is_ours = self._aside(lambda: connect(cluster, math.ceil(self._bundle.get("CPU", 1.0))))
            self.address: str = self._aside(lambda: ray_module().util.get_node_ip_address())
        except BaseException:
            self._thread.shutdown()
            raise

    def begin(self, specs: Sequence[bytes], seconds: float) -> None:
        """Start the other nodes, each with its line of `specs` (made by `host_spec`), once the
        cluster has room on enough hosts. Waits. Raises ConfigError if there is no room after
        `seconds`."""
        self._aside(lambda: self._begin(specs, seconds))

    def check(self) -> None:
        """Raise WorkerLost if a node or its actor has ended. Does not wait."""
        self._aside(self._check)

    def close(self) -> None:
        """Wait up to ENDING seconds for the nodes, kill their actors, free the bundles and leave
        the cluster. Idempotent."""
        try:
            self._aside(self._close)
        except RuntimeError:  # the thread has ended: close was called before
            return
        self._thread.shutdown()

    def _aside(self, act: Callable[[], Any]) -> Any:
        return self._thread.submit(act).result()

    def _begin(self, specs: Sequence[bytes], seconds: float) -> None:
        ray = ray_module()
        strategies = import_module("ray.util.scheduling_strategies")
        here = {**self._bundle, f"node:{self.address}": PINNED}
        bundles = [here, *(dict(self._bundle) for _ in specs)]
        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(timeout_seconds=seconds):
            had = {name: amount for name, amount in ray.cluster_resources().items() if not name.startswith("node:__")}
            raise ConfigError(
                f"the cluster did not place {self._nodes} nodes on {self._nodes} hosts, one of them {self.address}, in"
                f" {seconds:.0f} s; it has {had}",
                wanted=f"{self._bundle} on each",
                remedy="more hosts (`ray start --address=HEAD:PORT` there), fewer --nodes, or a longer --join-timeout",
            )
        for place, spec in enumerate(specs, 1):
            options = {
                "num_cpus": self._bundle.get("CPU", 0.0),
                "num_gpus": self._bundle.get("GPU", 0.0),
                "resources": {name: n for name, n in self._bundle.items() if name not in ("CPU", "GPU")} or None,
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=place
                ),
                "max_restarts": 0,
                "max_concurrency": 2,
            }
            actor = ray.remote(ChildActor).options(**options).remote(NODE, spec, {})
            self._actors.append(actor)
            self._ends.append(actor.wait.remote())

    def _check(self) -> None:
        ray = ray_module()
        ended, _ = ray.wait(self._ends, num_returns=1, timeout=0)
        if not ended:
            return
        place = self._ends.index(ended[0]) + 1
        try:
            how = f"with exit code {ray.get(ended[0])}"
        except ray.exceptions.RayError as error:
            how = f"with its actor: {last_line(str(error))}"
        raise WorkerLost(f"node {place} ended {how}", remedy="its log on that host says why")

    def _close(self) -> None:
        ray = ray_module()
        if self._ends:  # nodes whose leader has closed them end by themselves, in order
            ray.wait(self._ends, num_returns=len(self._ends), timeout=ENDING)
            self._ends.clear()
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "Ray is requested, and it is not installed",
            wanted="the package ray, of one version on all machines",
            remedy="pip install ray",
        )


def connect(address: str, room: int) -> bool:
    """Join the Ray cluster at `address` (HOST:PORT or auto), or with "local" start one with at
    least `room` CPUs. Waits. Returns True if this call joined it, False if this process was in a
    cluster already. Raises ConfigError.

    Must not be called on the main thread, where Ray would handle SIGTERM itself.
    """
    assert threading.current_thread() is not threading.main_thread()
    ray = ray_module()

    if ray.is_initialized():
        return False
    try:
        _try_head(address)
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                "local",
                num_cpus=max(room, os.cpu_count() or 1),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"no Ray cluster can be joined at {address!r}: {reason}",
            wanted="a cluster that includes this machine",
            remedy="run `ray start --head` here, or give local",
        ) from error
    return True


def _try_head(address: str) -> None:
    """Raise OSError if `address` is HOST:PORT and nothing listens there.

    Ray itself would retry for minutes.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), HEAD_SECONDS):
            pass


def last_line(text: str) -> str:
    """Return the last line of an error's text, where errors from a remote process have the
    cause."""
    return text.strip().rpartition("\n")[2].strip()


def ray_module() -> Any:
    """Return the module ray, which is imported only here, when it is needed. Raises ImportError."""
    return import_module("ray")
