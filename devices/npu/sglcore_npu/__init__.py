"""Ascend NPUs as a device. Importing this module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="npu",
    api=3,
    summary="Ascend NPUs of the generations A2 and A3",
    probe="sglcore_npu.probe:probe",
    facts="sglcore_npu.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "fused": "sglcore_npu.attention_fused:FusedAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={
        "full": "sglcore_npu.graphs:full",
        "breakable": "sglcore_npu.graphs:breakable",
        "piecewise": "sglcore_npu.graphs:piecewise",
    },
    kernels={"torch_npu": "sglcore_npu.kernels:kernels"},
    bring_up="sglcore_npu.bring_up:BRING_UP",
    communication=Communication("hccl", interface_variable="HCCL_SOCKET_IFNAME", cluster_resource="NPU"),
    pci=frozenset({PciClaim(0x19E5)}),
)
"""The declaration that `sglcore devices` and the core read."""
