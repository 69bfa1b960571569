"""AMD GPUs as a device. Importing this module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="hip",
    api=3,
    summary="AMD GPUs that ROCm serves",
    probe="sglcore_hip.probe:probe",
    facts="sglcore_hip.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "aiter": "sglcore_hip.attention_aiter:AiterAttention",
        "triton": "sglcore_hip.attention_triton:TritonAttention",
        "hip_radix": "sglcore_hip.attention_compressed:DeepseekV4HipRadixBackend",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_hip.graphs:full",
        "breakable": "sglcore_hip.graphs:breakable",
        "piecewise": "sglcore_hip.graphs:piecewise",
    },
    kernels={"triton": "sglcore_hip.kernels:kernels"},
    bring_up="sglcore_hip.bring_up:BRING_UP",
    communication=Communication(
        "nccl", in_graphs=True, interface_variable="NCCL_SOCKET_IFNAME", cluster_resource="GPU"
    ),
    pci=frozenset({PciClaim(0x1002)}),
)
"""The declaration that `sglcore devices` and the core read."""
