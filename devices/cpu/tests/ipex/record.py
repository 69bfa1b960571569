"""Record the results and schemas of the operators of Intel's extension in `recorded.json`.

`python devices/cpu/tests/ipex/record.py` writes the file; it needs the real extension and the torch
that the extension was built for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

STORED = Path(__file__).with_name("recorded.json")
CALLED = ("ipex_prepack::linear_prepack", "torch_ipex::add_rmsnorm", "torch_ipex::ipex_linear")
CALLED += ("torch_ipex::rmsnorm", "torch_ipex::rotary_position_embedding")
HEADS, DIM = 2, 8


def values(*shape: int, start: float = 0.0) -> Tensor:
    """Return float32 numbers in [-1, 1] without a pattern, the same with every torch."""
    return torch.sin(1.7 * torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + start).float().view(shape)


def answers() -> Mapping[str, Tensor]:
    """Run the registered operators; return their results by the name of the case."""
    own, pack = torch.ops.torch_ipex, torch.ops.ipex_prepack.linear_prepack
    x, weight, residual = values(3, 8), values(8, start=1), values(3, 8, start=2)
    heads, rows = values(1, 3, HEADS, DIM, start=3), values(5, DIM, start=4)
    matrix, bias = values(5, 8, start=5), values(5, start=6)
    plain, biased = pack(matrix, None, None), pack(matrix, bias, None)
    sizes = HEADS, DIM, DIM // 2, DIM
    found = {
        "norm": own.rmsnorm(x, weight, 1e-5),
        "norm of strided rows": own.rmsnorm(values(3, 16)[:, :8], weight, 1e-5),
        "norm of heads": own.rmsnorm(heads, weight, 1e-6),
        "norm of no rows": own.rmsnorm(x[:0], weight, 1e-5),
        "norm of a sum": own.add_rmsnorm(x, residual, weight, 1e-5, True),
        "the sum": residual,
        "rotation from the first row": own.rotary_position_embedding(heads, rows, torch.tensor(0), *sizes)[0],
        "rotation from the second": own.rotary_position_embedding(heads, rows, torch.tensor(1), *sizes)[0],
    }
    for name, context in {"product": plain, "product with a packed bias": biased}.items():
        args = context.get_weight(), bias, context.get_data_handle(), 5
        found[name] = own.ipex_linear(x, *args)
        found[f"{name}, no rows"] = own.ipex_linear(x[:0], *args)
    return found


def record() -> None:
    """Write the results of the real extension."""
    import intel_extension_for_pytorch as extension  # pyright: ignore[reportMissingImports]

    schemas = (str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name in CALLED)
    written = {
        "extension": extension.__version__,
        "torch": torch.__version__,
        "schemas": sorted(schemas),
        "answers": {
            name: [list(x.shape), [round(v, 6) for v in x.flatten().tolist()]] for name, x in answers().items()
        },
    }
    STORED.write_text(json.dumps(written).replace(', "', ',\n"') + "\n")


if __name__ == "__main__":
    record()
