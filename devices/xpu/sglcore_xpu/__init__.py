"""Intel GPUs as a device. Importing this module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim
from sglcore.worker.topology import Communication

GRAPHICS = ":00:02.0"
"""The PCI address suffix of Intel CPUs' integrated graphics. A virtual machine may have cards at
other addresses of this bus."""

package = DevicePackage(
    name="xpu",
    api=3,
    summary="Intel GPUs that torch's own xpu serves",
    probe="sglcore_xpu.probe:probe",
    facts="sglcore_xpu.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "triton": "sglcore_xpu.attention_triton:TritonAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_xpu.graphs:full",
        "breakable": "sglcore_xpu.graphs:breakable",
        "piecewise": "sglcore_xpu.graphs:piecewise",
    },
    kernels={"triton": "sglcore_xpu.kernels:kernels"},
    bring_up="sglcore_xpu.bring_up:BRING_UP",
    communication=Communication("xccl", cluster_resource="GPU"),
    pci=frozenset({PciClaim(0x8086, frozenset({0x0300, 0x0302, 0x0380}), GRAPHICS)}),
)
"""The declaration that `sglcore devices` and the core read. The vendor's processing accelerators
(PCI class 1200) are not GPUs."""
