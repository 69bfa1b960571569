"""Apple silicon through MLX, a lazy array library: its own worker, without torch. Importing this
module loads only the declaration."""

from sglcore.device.package import DevicePackage
from sglcore.worker.topology import Communication

package = DevicePackage(
    name="mlx",
    api=3,
    summary="Apple silicon (Metal); by name also other builds of MLX",
    probe="sglcore_mlx.probe:probe",
    facts="sglcore_mlx.facts:facts",
    worker="sglcore_mlx.worker:MlxWorker",
    attention={
        "metal": "sglcore_mlx.attention.paged:MetalAttention",
        "processor": "sglcore_mlx.attention.processor:ProcessorAttention",
        "gathered": "sglcore_mlx.attention.gathered:GatheredAttention",
        "compressed": "sglcore_mlx.attention.compressed:BlockAttention",
    },
    graphs={},
    kernels={"mlx": "sglcore_mlx.kernels:kernels"},
    bring_up="sglcore_mlx.bring_up:BRING_UP",
    communication=Communication(backend="ring", host_backend="ring", shares_device=True),
)
"""The declaration that `sglcore devices` and the core read."""
