"""The reference: a device package of the kit's own, on the host, in float32, with the reference
kernels and attention.

Every law passes on it, and every mutant of the kit is caught on it.
"""

from __future__ import annotations

from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.device.probe import Fact, ProbeReport
from sglcore.device.system import System


def probe(named: bool, system: System) -> ProbeReport:
    """Return a report in which all four facts hold: the reference is always there. The arguments
    are not used."""
    fact = Fact(True, "the reference needs nothing but torch")
    return ProbeReport(fact, fact, fact, fact)


def facts(index: int = 0) -> Facts:
    """Return the facts of the reference: host memory, no streams, and 32-bit integers, so that the
    reference shows that none other are needed. Its replays run host code again, which reads
    lengths. `index` is not used."""
    return Facts(tensor_device="cpu", index_dtype="int32", needs_host_lengths=True, shares_host_memory=True)


package = DevicePackage(
    name="reference",
    api=3,
    summary="the definition of correct",
    is_host=True,
    probe="sglcore.conformance.reference_device:probe",
    facts="sglcore.conformance.reference_device:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
        "replayable": "sglcore.conformance.reference_parts:ReplayableAttention",
    },
    graphs={"replayed": "sglcore.conformance.reference_parts:ReplayedGraphs"},
    kernels={"reference": "sglcore.runtime.kernels.table:KernelTable"},
    bring_up="sglcore.conformance.reference_parts:BRING_UP",
)
