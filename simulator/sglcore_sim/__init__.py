"""A simulated accelerator under torch: real device names, streams and graphs on a CPU, and a fault where hardware would corrupt."""

from sglcore_sim.faults import KINDS, Caught, Fault
from sglcore_sim.simulator import Simulator, current, install

__all__ = ["KINDS", "Caught", "Fault", "Simulator", "current", "install"]
