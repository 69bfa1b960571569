"""`choose_dispatcher`, the bring-up decision how token rows are sent to experts on other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.parallel.expert_dispatch import FixedDispatcher, MakeDispatcher, RaggedDispatcher

TOLD: Mapping[str, str] = MappingProxyType(
    {
        "ragged": "only the existing rows, by all-to-all; the host waits for their counts",
        "fixed": "a place for each row of each rank at every expert, so that no shape depends on the routing",
    }
)
"""The reference dispatchers, with descriptions for the ledger."""


def choose_dispatcher(config: EngineConfig, package: DevicePackage, ledger: DecisionLedger) -> MakeDispatcher:
    """Return what makes expert dispatchers, such as the class `RaggedDispatcher`: by the configured
    name, or with "auto" the first that the device package offers, else the ragged reference.

    Recorded in the ledger with expert parallelism. Raises ConfigError for an unknown name.
    """
    assert package.communication is not None
    offered = package.communication.dispatchers
    asked = config.expert_dispatch
    name = next(iter(offered), "ragged") if asked == "auto" else asked
    if name not in offered and name not in TOLD:
        raise ConfigError(
            f"expert_dispatch is {asked!r}", wanted=f"auto or one of {', '.join(dict.fromkeys((*offered, *TOLD)))}"
        )
    if config.ep > 1:
        why = f"the device's own, {offered[name]}" if name in offered else TOLD[name]
        ledger.record(Row("expert dispatch", asked, name, why, "--expert-dispatch ragged or fixed"))
    if name in offered:
        return resolve(offered[name], package.name)
    return RaggedDispatcher if name == "ragged" else FixedDispatcher
