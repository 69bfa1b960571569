"""acme as a device. Nothing is imported but the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim

package = DevicePackage(
    name="acme",
    api=3,
    summary="acme accelerators that torch_acme serves",
    probe="sglcore_acme.probe:probe",
    facts="sglcore_acme.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "triton": "sglcore_acme.attention_triton:TritonAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_acme.graphs:full",
        "breakable": "sglcore_acme.graphs:breakable",
        "piecewise": "sglcore_acme.graphs:piecewise",
    },
    kernels={"triton": "sglcore_acme.kernels:kernels"},
    bring_up="sglcore_acme.bring_up:BRING_UP",
    pci=frozenset({PciClaim(0xACE5)}),
)
"""What `sglcore devices` and the core read."""
