"""A leader and other nodes in one process: each has ranks of its own, and everything goes over
TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglcore.core.errors import SglcoreError
from sglcore.engine.ranks.host_process import Node
from sglcore.engine.ranks.rank_launch import Placement
from tests.parallel import defects
from tests.parallel.engine import configured
from tests.parallel.forked import Defect, Forking


def free_port() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class OtherNode(threading.Thread):
    """A node in its own thread; sets `code` or `error` when it ends."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        node: int = 1,
        nodes: int = 2,
        local: int = 0,
        timeout: float = 60.0,
        defect: Defect = defects.nothing,
        prepare: Callable[[Any], Any] = lambda given: given,
        **settings: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.forking = Forking(defect)
        self.code: int | None = None
        self.error: SglcoreError | None = None
        config = configured(folder, nodes=nodes, **settings)
        placement = Placement("hand", "--node-rank is given", nodes, node, ("127.0.0.1", port), local, local + 1)
        self.node = Node(placement, lambda: prepare((config, folder)), timeout, self.forking)
        self.start()

    def run(self) -> None:
        try:
            self.code = self.node.follow()
        except SglcoreError as error:
            self.error = error

    def ended(self) -> int | None:
        """Wait for the node's end and return its exit code; check that none of its processes is
        left."""
        self.join(60)
        assert not self.is_alive(), "a node outlives its leader"
        assert all(process.poll() is not None for process in self.forking.processes)
        return self.code
