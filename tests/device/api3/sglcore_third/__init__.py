"""A made-up device, written for number 3 of the contract and frozen: a digest is kept of its files."""

from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciClaim
from sglcore.device.topology import Communication

package = DevicePackage(
    name="third",
    api=3,
    summary="made-up accelerators that torch_third serves",
    is_host=False,
    probe="sglcore_third.probe:probe",
    facts="sglcore_third.facts:facts",
    worker="sglcore.runtime.tp_worker:TpModelWorker",
    attention={
        "rows": "sglcore_third.attention:RowsAttention",
        "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        "triton": "sglcore_third.attention_triton:TritonAttention",
        "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
    },
    graphs={"full": "sglcore_third.graphs:full", "breakable": "sglcore_third.graphs:breakable"},
    kernels={"own": "sglcore_third.kernels:kernels", "triton": "sglcore_third.kernels:triton_table"},
    bring_up="sglcore_third.bring_up:BRING_UP",
    pci=frozenset({PciClaim(0xA913)}),
    communication=Communication("thirdccl", host_backend="gloo", in_graphs=True, cluster_resource="THIRD"),
    partition="sglcore_third.partition:partition",
)
"""What `sglcore devices` and the core read."""
