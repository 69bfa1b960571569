"""Features of torch on a simulated device: factories, views, layers, compile, files, the
accelerator API."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


def same(device_value, host_value, **tolerance):
    assert device_value.device.type != "cpu"
    torch.testing.assert_close(device_value.cpu(), host_value, **tolerance)


@feature
def inference_mode(sim, dev):
    with torch.inference_mode():
        x = torch.ones(3, device=dev)
        x.add_(1)
        same(x.view(3, 1) + x, torch.full((3, 3), 4.0))


@feature
def index_select_into(sim, dev):
    x, out = torch.arange(12.0, device=dev).view(4, 3), torch.empty(2, 3, device=dev)
    torch.index_select(x, 0, torch.tensor([1, 3], device=dev), out=out)
    same(out, torch.arange(12.0).view(4, 3)[[1, 3]])


@feature
def where_into(sim, dev):
    x, out = torch.tensor([1.0, -1.0], device=dev), torch.empty(2, device=dev)
    torch.where(x > 0, x, x * 2, out=out)
    same(out, torch.tensor([1.0, -2.0]))


@feature
def an_out_tensor_is_resized(sim, dev):
    out = torch.empty(0, device=dev)
    torch.add(torch.ones(3, device=dev), 1, out=out)
    same(out, torch.full((3,), 2.0))


@feature
def attention(sim, dev):
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        q, mask = torch.randn(1, 4, 5, 8).to(dtype), torch.ones(5, 5, dtype=torch.bool).tril()
        wanted = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), attn_mask=mask)
        found = F.scaled_dot_product_attention(q.to(dev), q.to(dev), q.to(dev), attn_mask=mask.to(dev))
        same(found.float(), wanted, atol=error, rtol=1e-2)
        same(
            F.scaled_dot_product_attention(q.to(dev), q.to(dev), q.to(dev), is_causal=True).float(),
            wanted,
            atol=error,
            rtol=1e-2,
        )
        k = q[:, :2].to(dev)
        assert F.scaled_dot_product_attention(q.to(dev), k, k, enable_gqa=True).shape == q.shape


@feature
def compiled_on_plain_backends(sim, dev):
    x = torch.randn(4, 4, device=dev)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        same(
            torch.compile(lambda t: torch.relu(t @ t.T) + t.sum(), backend=backend)(x),
            (torch.relu(x @ x.T) + x.sum()).cpu(),
        )


@feature
def fake_tensors(sim, dev):
    with FakeTensorMode():
        x = torch.empty(4, 4, device=dev)
        assert (x @ x).device == dev


@feature
def sorting_and_scattering(sim, dev):
    x = torch.randn(9, generator=torch.Generator().manual_seed(1))
    y = x.to(dev)
    same(y.sort().values, x.sort().values)
    same(y.topk(3).indices, x.topk(3).indices)
    same(y.cumsum(0), x.cumsum(0))
    total = torch.zeros(4, device=dev).scatter_add_(0, torch.tensor([0, 1, 1], device=dev), torch.ones(3, device=dev))
    same(total, torch.tensor([1.0, 2.0, 0.0, 0.0]))


@feature
def layers_and_gradients(sim, dev):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.RMSNorm(8)
    )
    twin = copy.deepcopy(net).to(dev)
    tokens = torch.tensor([1, 2])
    wanted, found = net(tokens), twin(tokens.to(dev))
    same(found, wanted)
    wanted.sum().backward()
    found.sum().backward()
    same(twin[1].weight.grad, net[1].weight.grad)


@feature
def half_precision(sim, dev):
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.randn(4, 4).to(dtype)
        same(a.to(dev) @ a.to(dev), a @ a)
        same(F.layer_norm(a.to(dev), (4,)), F.layer_norm(a, (4,)))
        same(a.to(dev).softmax(-1), a.softmax(-1))
    assert torch.randn(4, 4, device=dev).to(torch.float8_e4m3fn).float().device == dev


@feature
def pinned_memory(sim, dev):
    x = torch.ones(4).pin_memory()
    assert x.is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert not torch.empty(4).is_pinned()
    assert x.to(dev, non_blocking=True).to("cpu", non_blocking=True).is_pinned()
    torch.accelerator.synchronize()


@feature
def views_of_other_dtypes(sim, dev):
    x = torch.zeros(4, dtype=torch.int32, device=dev)
    x.view(torch.float32).fill_(1.0)
    assert x.tolist() == [0x3F800000] * 4
    assert x.view(torch.uint8).shape == (16,)
    assert x.view(torch.int64).shape == (2,)


@feature
def views_share_their_bytes(sim, dev):
    host = torch.arange(24.0).view(2, 3, 4)
    x = host.to(dev)
    same(
        x.transpose(0, 1)[1:, :, ::2].unsqueeze(0).expand(2, -1, -1, -1).flatten(1),
        host.transpose(0, 1)[1:, :, ::2].unsqueeze(0).expand(2, -1, -1, -1).flatten(1),
    )
    x.select(0, 1).fill_(7)
    assert x[1, 2, 3].item() == 7
    assert x[1].data_ptr() == x.data_ptr() + 48
    a, b = x.split(1)
    same(torch.cat([a, b]), x.cpu())


@feature
def factories(sim, dev):
    x = torch.ones(4, 5, device=dev).t()
    assert torch.empty_like(x).stride() == x.stride()
    made = [
        torch.zeros_like(x), x.new_zeros(3), torch.arange(5, device=dev), torch.tensor([1, 2], device=dev), torch.linspace(0, 1, 5, device=dev),
        torch.eye(3, device=dev), torch.rand(3, device=dev), torch.randint(0, 5, (3,), device=dev), torch.full((2,), 3, device=dev),
        torch.randperm(5, device=dev), torch.ones(3, 3, device=dev).tril(), torch.tril_indices(3, 3, device=dev),
    ]  # fmt: skip
    assert {tensor.device for tensor in made} == {dev}
    with torch.device(dev):
        assert torch.nn.Linear(3, 3).weight.device == dev


@feature
def seeds(sim, dev):
    torch.manual_seed(3)
    first = torch.rand(3, device=dev)
    torch.manual_seed(3)
    same(torch.rand(3, device=dev), first.cpu())


@feature
def copies_pickles_and_files(sim, dev):
    x, file = torch.ones(3, device=dev), io.BytesIO()
    same(copy.deepcopy(x), torch.ones(3))
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file).device == dev
    file.seek(0)
    assert torch.load(file, map_location="cpu").device.type == "cpu"


@feature
def storages(sim, dev):
    x = torch.ones(4, device=dev)
    storage = x.untyped_storage()
    assert (storage.nbytes(), storage.device) == (16, dev)
    empty: Any = torch.empty(0, device=dev)
    empty.set_(storage, 0, (2, 2)).fill_(5)
    same(x, torch.full((4,), 5.0))
    assert empty.set_(x).resize_(8).shape == (8,)


@feature
def two_devices(sim, dev):
    other = sim.device(1)
    x = torch.ones(3, device=other)
    assert (x + 1).device == other
    assert x.to(dev).device == dev
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device=dev.type).device == other


@feature
def accelerator_api(sim, dev):
    api = torch.accelerator
    assert api.is_available()
    assert (api.device_count(), api.current_device_index()) == (2, 0)
    assert api.current_accelerator() == torch.device(dev.type)
    api.empty_cache()
    api.reset_peak_memory_stats()
    x = torch.empty(1 << 16, dtype=torch.uint8, device=dev)
    assert api.max_memory_allocated() >= api.memory_allocated() >= x.nbytes
    assert api.memory_reserved() >= api.memory_allocated()
    assert api.memory_stats()["allocated_bytes.all.current"] == api.memory_allocated()
    assert api.get_memory_info()[1] == sim.memory
    api.empty_host_cache()
    stream = torch.Stream(dev)
    before = api.current_stream()
    api.set_stream(stream)
    assert api.current_stream() == stream
    api.set_stream(before)


@feature
def streams_and_events(sim, dev):
    stream, first, last = torch.Stream(dev), torch.Event(dev, enable_timing=True), torch.Event(dev, enable_timing=True)
    first.record(stream)
    with stream:
        torch.ones(2, device=dev)
    last.record(stream)
    stream.wait_event(first)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    assert stream.query()
    stream.record_event().wait(torch.accelerator.current_stream())
    assert hash(stream) != hash(torch.Stream(dev))


@feature
def autocast(sim, dev):
    with torch.autocast(dev.type, dtype=torch.bfloat16):
        x = torch.randn(4, 4, device=dev)
        assert (x @ x).dtype == torch.bfloat16


@feature
def custom_operators(sim, dev):
    @torch.library.custom_op("simtest::twice", mutates_args=("y",), device_types="cpu")
    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.copy_(x * 2)
        return x + 1

    x, y = torch.ones(3, device=dev), torch.empty(3, device=dev)
    same(torch.ops.simtest.twice(x, y), torch.full((3,), 2.0))
    same(y, torch.full((3,), 2.0))


@feature
def convolutions(sim, dev):
    x, kernel = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 2, 2)
    same(F.conv2d(x.to(dev), kernel.to(dev)), F.conv2d(x, kernel))
    rows, each = torch.randn(2, 6, 9), torch.randn(6, 1, 4)
    for bias in (None, torch.randn(6)):
        found = F.conv1d(rows.to(dev), each.to(dev), None if bias is None else bias.to(dev), padding=3, groups=6)
        same(found, F.conv1d(rows, each, bias, padding=3, groups=6))


@feature
def printing(sim, dev):
    assert dev.type in repr(torch.ones(3, device=dev))


@pytest.mark.parametrize("name", FEATURES)
def test_the_device_offers(sim, dev, name):
    FEATURES[name](sim, dev)


def test_safetensors_reach_the_device(sim, dev, tmp_path):
    save_file({"a": torch.arange(3.0)}, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors", device=str(dev))["a"]
    same(loaded, torch.arange(3.0))
    save_file({"a": loaded}, tmp_path / "again.safetensors")


def test_a_second_install_is_refused(sim):
    import sglcore_sim

    with pytest.raises(RuntimeError, match="one kind per process"):
        sglcore_sim.install("cuda")


def test_torch_cuda_runs_its_own_code(sim, dev):
    if sim.kind.torch_name != "cuda":
        pytest.skip("needs the cuda names")
    cuda = torch.cuda
    assert cuda.is_available()
    assert cuda.device_count() == 2
    assert cuda.Stream.__module__ == "torch.cuda.streams"
    stream, event = cuda.Stream(), cuda.Event(enable_timing=True)
    with cuda.stream(stream):
        assert cuda.current_stream() == stream
        assert torch.accelerator.current_stream().stream_id == stream.stream_id
        event.record()
    stream.wait_stream(cuda.current_stream())
    event.wait(cuda.current_stream())
    assert isinstance(stream, torch.Stream)
    assert stream.cuda_stream != 0
    assert cuda.default_stream().cuda_stream == 0
    assert cuda.mem_get_info()[1] == sim.memory
    assert cuda.memory_summary()
    assert cuda.max_memory_allocated() >= cuda.memory_allocated()
    assert cuda.get_device_properties(0).total_memory == sim.memory
    assert isinstance(cuda.get_device_capability(), tuple)
    assert bool(torch.version.hip) == (sim.kind.name == "hip")
    assert torch.ones(2).cuda().is_cuda
    with pytest.raises(RuntimeError, match="not supported"):
        torch.accelerator.Graph()


def test_torch_cuda_graph_captures_on_a_stream_of_its_own(sim, dev):
    if sim.kind.torch_name != "cuda":
        pytest.skip("needs the cuda names")
    x, graph = torch.ones(3, device=dev), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 2
    graph.replay()
    assert y.tolist() == [2.0] * 3
    with sim.expect("sync_in_capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


@pytest.mark.sim("neutral_graph")
def test_the_accelerator_graph_is_a_context(sim, dev):
    x, side = torch.ones(3, device=dev), torch.Stream(dev)
    graph = torch.accelerator.Graph()
    torch.accelerator.synchronize()
    with side, graph:
        y = x * 2
    graph.replay()
    assert y.tolist() == [2.0] * 3
