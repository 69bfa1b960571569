"""A recorded step replays its calls on the current contents of the buffers and keeps the memory it
needs; a step that can not be replayed is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_kernels
from sglcore_cpu.kernels.operations import Operations
from sglcore_cpu.kernels.table import native_table
from sglcore_cpu.native import Engine
from sglcore_cpu.native_graphs import NativeGraphs
from sglcore_cpu.recording import HostCall, NotCapturable, StepArena

ROWS, WIDTH = 3, 48


def values(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def norms(engine: Engine, x: Tensor, weight: Tensor, count: int) -> Callable[[], Tensor]:
    """Return a step of `count` norms, each of the previous result."""
    operations = Operations(engine)

    def step() -> Tensor:
        hidden = x
        for _ in range(count):
            hidden = operations.rms_norm(hidden, weight, 1e-6)
        return hidden

    return step


def expected(x: Tensor, weight: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = reference_kernels.rms_norm(x, weight, 1e-6)
    return x


@torch.inference_mode()
def test_a_replay_computes_on_what_the_buffers_hold(engine: Engine) -> None:
    x, weight = values(0), torch.rand(WIDTH) + 0.5
    step = NativeGraphs().capture(norms(engine, x, weight, 5))
    for seed in (1, 2, 1):
        x.copy_(values(seed))
        torch.testing.assert_close(step.replay(None), expected(x, weight, 5), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_nothing_runs_while_a_step_is_recorded(engine: Engine) -> None:
    x = values(0)
    output = NativeGraphs().capture(norms(engine, x, torch.ones(WIDTH), 1)).output
    assert not output.any()


@torch.inference_mode()
def test_results_share_memory_once_nobody_needs_them(engine: Engine) -> None:
    graphs = NativeGraphs()
    long = graphs.capture(norms(engine, values(0), torch.ones(WIDTH), 40))
    size = graphs._arena.num_bytes
    assert size <= 3 * ROWS * WIDTH * 4 + 3 * 64
    short = graphs.capture(norms(engine, values(0), torch.ones(WIDTH), 2))
    assert graphs._arena.num_bytes <= size + ROWS * WIDTH * 4 + 64
    assert short.output.data_ptr() != long.output.data_ptr(), "an output is kept as long as its step"


@torch.inference_mode()
def test_what_is_still_needed_is_not_given_away(engine: Engine) -> None:
    """All results are kept until the end and then added; if the memory of one were reused, the sum
    would differ."""
    operations, x, weights = Operations(engine), values(0), [torch.rand(WIDTH) + i for i in range(6)]

    def step() -> Tensor:
        held = [operations.rms_norm(x, weight, 1e-6) for weight in weights]
        total = held[0]
        for part in held[1:]:
            total = operations.add_rms_norm(part, total, torch.ones(WIDTH), 1e-6)[1]
        return total

    captured = NativeGraphs().capture(step)
    x.copy_(values(3))
    wanted = sum(reference_kernels.rms_norm(x, weight, 1e-6) for weight in weights)
    torch.testing.assert_close(captured.replay(None), wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_what_torch_computes_between_kernels_is_computed_again(engine: Engine) -> None:
    operations, x, weight = Operations(engine), values(0), torch.rand(WIDTH) + 0.5

    def step() -> Tensor:
        normed = operations.rms_norm(x, weight, 1e-6)
        left, right = normed.chunk(2, dim=-1)
        order = torch.sort(left.sum(dim=-1), stable=True)[1]
        mixed = torch.cat((torch.tanh(left) * 2, right), dim=-1)[order].contiguous()
        mixed.add_(1.0)
        return operations.rms_norm(mixed, weight, 1e-6)

    captured = NativeGraphs().capture(step)
    assert sum(isinstance(part, HostCall) for part in captured.parts) > 3
    for seed in (4, 5):
        x.copy_(values(seed))
        torch.testing.assert_close(captured.replay(None).clone(), step(), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_rows_of_another_type_and_plain_products_are_kernels(engine: Engine) -> None:
    """In a recorded step they are kernels; eagerly torch casts, and multiplies many rows."""
    table, x, weight, ones = native_table(engine), values(0), torch.randn(20, WIDTH), torch.ones(WIDTH)

    def step() -> Tensor:
        normed = table.rms_norm(x, ones, 1e-6)
        return table.linear(normed.bfloat16().float(), weight, None).bfloat16()

    captured = NativeGraphs().capture(step)
    assert not any(isinstance(part, HostCall) for part in captured.parts)
    for seed in (6, 7):
        x.copy_(values(seed))
        wanted = torch.nn.functional.linear(expected(x, ones, 1).bfloat16().float(), weight)
        torch.testing.assert_close(captured.replay(None).float(), wanted, atol=0.1, rtol=1e-2)
        torch.testing.assert_close(step().float(), wanted, atol=0.1, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_sums_products_and_gates_of_rows_are_kernels(engine: Engine, dtype: torch.dtype) -> None:
    """Operands are rows with and without gaps, one number per row, one row for all rows, and
    numbers. Results are bitwise equal except for the sigmoid."""
    operations, x, weight = Operations(engine), values(0).to(dtype), (torch.rand(WIDTH) + 0.5).to(dtype)

    def between(normed: Tensor) -> Tensor:
        left, right = normed.split((19, WIDTH - 19), dim=-1)
        gated = torch.sigmoid(left[:, 3:4]) * right
        total = (gated + normed[:, : WIDTH - 19]) * 0.3 + right * weight[None, 19:]
        return total.mul_(1.7).add_(right[:1])

    captured = NativeGraphs().capture(lambda: between(operations.rms_norm(x, weight, 1e-6)))
    assert not any(isinstance(part, HostCall) for part in captured.parts)
    bound = 2**-6 if dtype is torch.bfloat16 else 1e-6
    for seed in (8, 9):
        x.copy_(values(seed))
        wanted = between(operations.rms_norm(x, weight, 1e-6))
        torch.testing.assert_close(captured.replay(None), wanted, atol=bound, rtol=bound)


@torch.inference_mode()
def test_other_sums_are_torchs(engine: Engine) -> None:
    """Sums with more dimensions, with a factor, with two dtypes, or of transposed rows."""
    operations, x = Operations(engine), values(0)

    def step() -> Tensor:
        normed = operations.rms_norm(x, torch.ones(WIDTH), 1e-6)
        cube = normed.view(ROWS, 4, 12) + 1.0
        wide = torch.add(normed, cube.view(ROWS, WIDTH), alpha=2.0) + normed.double()
        return (wide.float() + normed.mT.contiguous().mT)[0]

    captured = NativeGraphs().capture(step)
    assert sum(isinstance(part, HostCall) for part in captured.parts) >= 4
    x.copy_(values(10))
    torch.testing.assert_close(captured.replay(None).clone(), step(), atol=1e-6, rtol=1e-6)


@torch.inference_mode()
def test_a_step_that_reads_a_result_on_the_host_is_refused_by_name(engine: Engine) -> None:
    operations, x = Operations(engine), values(0)

    def step() -> Tensor:
        normed = operations.rms_norm(x, torch.ones(WIDTH), 1e-6)
        return normed * normed.sum().item()

    with pytest.raises(NotCapturable, match="_local_scalar_dense copies a value to the host.*--graph off"):
        NativeGraphs().capture(step)
    assert operations.rms_norm(x, torch.ones(WIDTH), 1e-6).any(), "recording has ended, kernels run again"


def test_a_block_is_lent_again_only_when_its_tensor_and_all_views_are_gone() -> None:
    arena = StepArena()
    first = arena.empty((4, 8), torch.float32)
    view, address = first[1:, :3], first.data_ptr()
    del first
    assert arena.empty((4, 8), torch.float32).data_ptr() != address
    del view
    assert arena.empty((2, 8), torch.float32).data_ptr() == address


@pytest.mark.parametrize("shape", [(0,), (0, 7), (1,), (3, 5, 7)])
def test_the_arena_gives_aligned_zeros_of_any_shape(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.int64):
        made = StepArena().empty(shape, dtype)
        assert made.shape == shape and made.dtype is dtype and made.is_contiguous()
        assert made.data_ptr() % 64 == 0 or not made.numel()
        assert not made.any()
