"""The parts of the old device: a probe without a system, a graph backend made without arguments."""

from sglcore.device.facts import Facts
from sglcore.device.probe import Fact, ProbeReport


def probe(named):
    """Present when it is named."""
    yes = Fact(True, "always there")
    return ProbeReport(hardware=Fact(bool(named), "only when it is named"), driver=yes, package=yes, runtime=yes)


def facts():
    """The host's memory, as API 1 wrote it."""
    return Facts(tensor_device="cpu", page_size=4, shares_host_memory=True)


class Step:
    """Calls the step again."""

    def __init__(self, step):
        self.step = step

    def replay(self, update):
        """The step's output."""
        return self.step()


class Again:
    """A graph backend that captures nothing."""

    kind = "again"

    def capture(self, step):
        """One forward."""
        return Step(step)

    def close(self):
        """Nothing to free."""
