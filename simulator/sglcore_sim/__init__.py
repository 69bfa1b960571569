"""A simulated accelerator under torch: real device names, streams and graphs on a CPU, and a fault
where hardware would silently corrupt data.

Importing this module does not import torch, so a pytest run without a simulated device does not
either; the public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore_sim.faults import KINDS as KINDS
    from sglcore_sim.faults import Caught as Caught
    from sglcore_sim.faults import Fault as Fault
    from sglcore_sim.simulator import Simulator as Simulator
    from sglcore_sim.simulator import current as current
    from sglcore_sim.simulator import install as install

__all__ = ("KINDS", "Caught", "Fault", "Simulator", "current", "install")


def __getattr__(name: str) -> object:
    """Return the public name of this package, imported from its module; Python calls it for a name
    that is not here yet. Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module 'sglcore_sim' has no attribute {name!r}; it offers {', '.join(__all__)}")
    home = "faults" if name in ("KINDS", "Caught", "Fault") else "simulator"
    return getattr(import_module(f"sglcore_sim.{home}"), name)
