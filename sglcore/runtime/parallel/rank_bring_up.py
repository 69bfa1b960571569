"""The nested order of the bring-up that connects the ranks. With one rank it loads no communication
library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up_steps import NestedOrder
from sglcore.device.package import DevicePackage
from sglcore.runtime.speculative.speculation_choice import most_rows
from sglcore.worker.topology import Place

if TYPE_CHECKING:
    from sglcore.runtime.parallel.process_group import Group
    from sglcore.runtime.parallel.rank_groups import Groups


def world(
    config: EngineConfig, package: DevicePackage, device: torch.device, place: Place | None = None
) -> Group | None:
    """Bring-up step: connect all ranks and return their group; waits for them. With
    `config.poison` each collective is checked (`Group`).

    None with one rank: no communication library is loaded.
    """
    if place is None or package.communication is None:
        return None
    from sglcore.runtime.parallel.process_group import join

    return join(place, package.communication, checks=config.poison)


def groups(
    config: EngineConfig,
    package: DevicePackage,
    ledger: DecisionLedger,
    world: Group | None,
    place: Place | None = None,
) -> Groups | None:
    """Bring-up step: return the communication groups of this rank, with the expert dispatcher of
    `choose_dispatcher`. Every rank calls this.

    None with one rank, which needs no collectives.
    """
    if world is None or place is None or package.communication is None:
        return None
    from sglcore.runtime.parallel.parallel_bring_up import choose_dispatcher
    from sglcore.runtime.parallel.rank_groups import divided

    make = choose_dispatcher(config, package, ledger)
    most = max(config.max_batch_tokens, config.max_requests * most_rows(config))
    return divided(world, place, package.communication, make, most)


RANKS = NestedOrder("ranks", {"device": (world, groups)}, exports=("groups",))
"""How the ranks of one model are connected."""
