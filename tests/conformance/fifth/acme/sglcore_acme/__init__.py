"""acme as a device. Nothing is imported but the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim

package = DevicePackage(
    name="acme",
    api=3,
    summary="acme accelerators",
    probe="sglcore_acme.probe:probe",
    facts="sglcore_acme.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={"gathered": "sglcore.runtime.attention.gathered:GatheredAttention"},
    graphs={"full": "sglcore_acme.graphs:full", "breakable": "sglcore_acme.graphs:breakable"},
    kernels={"acme": "sglcore_acme.kernels:kernels"},
    bring_up="sglcore_acme.bring_up:BRING_UP",
    pci=frozenset({PciClaim(0xACE5)}),
)
"""What `sglcore devices` and the core read."""
