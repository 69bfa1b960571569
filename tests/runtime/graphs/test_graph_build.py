"""The choice of graphs at a start: the requested kind or the device's default, its reason in the
ledger, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, StrictError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.runtime import bring_up
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.graphs import stream_graphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.graph_choice import capture, make_backend
from sglcore.runtime.graphs.piecewise import as_traced, inductor
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.streams import Streams
from tests.checkpoints import llama, save
from tests.models.steps import load
from tests.runtime.recording import RecordingCapture, make_streams
from tests.runtime.recording import make_backend as mechanism
from tests.runtime.tiny import RecordedGraphs, Site, make_site

STREAMS = Facts(tensor_device="cpu", shares_host_memory=True, has_streams=True, default_graph="full")
NAME = __name__


def full(facts: Facts, streams: Streams) -> FullGraphs:
    """A factory with the current signature."""
    return FullGraphs(RecordingCapture(), streams)


def breakable(facts: Facts, streams: Streams) -> FullGraphs:
    """A factory of graphs that also serve prefill."""
    return mechanism("breakable", RecordingCapture(), streams)


def again(facts: Facts, streams: Streams) -> RecordedGraphs:
    """A factory that needs no streams."""
    return RecordedGraphs()


def package(**graphs: str) -> DevicePackage:
    """A device with these graphs."""
    return DevicePackage(
        name="made",
        api=3,
        summary="made up",
        probe="a:b",
        facts="a:b",
        worker="a:b",
        attention={
            "reference": "sglcore.runtime.attention.reference:ReferenceAttention",
            "gathered": "sglcore.runtime.attention.gathered:GatheredAttention",
        },
        graphs=graphs or {"full": f"{NAME}:full", "breakable": f"{NAME}:breakable"},
        kernels={"plain": "sglcore.runtime.kernels.table:KernelTable"},
        bring_up="a:b",
    )


def choose(graph: str, facts: Facts = STREAMS, site: Site | None = None, strict: bool = False, **graphs: str):
    """The chosen mechanism, and the ledger's rows."""
    ledger = DecisionLedger(strict=strict)
    site = site or make_site(attention=GatheredAttention)
    config = EngineConfig(graph=graph)
    backend = make_backend(config, package(**graphs), facts, make_streams(), site.attention, ledger)
    return backend, ledger.rows


@pytest.mark.parametrize(("graph", "kind"), [("auto", "full"), ("full", "full"), ("breakable", "full")])
def test_auto_is_the_devices_own_kind_and_a_kind_is_taken_at_its_word(graph: str, kind: str) -> None:
    backend, _ = choose(graph)
    assert backend is not None and backend.kind == kind
    assert isinstance(backend, FullGraphs)
    assert (type(backend) is FullGraphs) is (graph != "breakable")


@pytest.mark.parametrize(("graph", "default"), [("off", "full"), ("auto", "off")])
def test_eager_is_said_with_its_reason_and_the_kinds_there_are(graph: str, default: str) -> None:
    backend, rows = choose(graph, Facts(tensor_device="cpu", has_streams=True, default_graph=default))
    assert backend is None
    assert rows[0].effective == "eager" and "full, breakable" in rows[0].remedy
    assert rows[0].reason


def test_a_kind_that_is_not_offered_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'compiled' is not offered by device 'made'.*one of full, breakable"):
        choose("compiled")


def test_attention_that_can_not_be_captured_leaves_decode_eager_and_says_why() -> None:
    backend, rows = choose("auto", site=make_site(attention=ReferenceAttention))
    assert backend is None
    assert rows == (Row("graph", "auto", "eager", rows[0].reason, "--graph off"),)
    assert "ReferenceAttention cannot run inside a captured stream" in rows[0].reason


def test_an_explicit_kind_that_can_not_be_had_is_a_downgrade_and_strict_refuses_it() -> None:
    site = make_site(attention=ReferenceAttention)
    assert choose("full", site=site)[1][0].downgrade
    with pytest.raises(StrictError):
        choose("full", site=site, strict=True)


def test_a_device_without_streams_captures_any_attention() -> None:
    host = Facts(tensor_device="cpu")
    backend, _ = choose("again", host, make_site(), again=f"{NAME}:again")
    assert isinstance(backend, RecordedGraphs)


class Silent:
    """A model without segments."""

    def __init__(self, model: Any) -> None:
        self.embedding = model.embedding
        self.attention_layers = model.attention_layers

    def __call__(self, batch: Any) -> Any:
        """Return embeddings without attention."""
        return self.embedding[batch.input_ids]


def capture_all(kind: str, site: Site, **config: Any) -> tuple[ModelRunner, tuple[Row, ...]]:
    """The runner with its graphs, and the ledger's rows."""
    ledger, streams = DecisionLedger(), make_streams()
    backend = mechanism(kind, RecordingCapture(), streams)
    settings = EngineConfig(graph=kind, graph_buckets=(1, 4), **config)
    site.runner.streams = streams
    site.runner.graphs = capture(settings, STREAMS, backend, site.runner, ledger, lambda done, total: None)
    return site.runner, ledger.rows


def test_the_ledger_says_what_replays_and_what_stays_eager() -> None:
    rows = capture_all("full", make_site(attention=GatheredAttention))[1]
    assert rows[0].reason.startswith("decode at batch sizes 1, 4; larger batches and prompts run eagerly")
    _, rows = capture_all("breakable", make_site(attention=GatheredAttention), shadow=3)
    assert "prompts at 1 sizes from 4 to 4 tokens by breakable graphs" in rows[0].reason
    assert "fewer than 2 tokens" in rows[0].reason
    assert (rows[1].topic, rows[1].requested) == ("shadow", "3")


def test_a_model_that_asks_for_no_segments_is_refused_with_the_way_out() -> None:
    site = make_site(attention=GatheredAttention)
    site.runner.model = Silent(site.model)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match=r"cannot be captured in pieces.*--graph full"):
        capture_all("breakable", site)


@pytest.mark.parametrize(
    ("compiles", "interpreted", "chosen"),
    [(True, False, inductor), (True, True, as_traced), (False, False, as_traced)],
)
def test_pieces_are_compiled_where_torch_can_and_no_kernel_is_interpreted(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, interpreted: bool, chosen: object
) -> None:
    monkeypatch.setattr(stream_graphs, "_interpreted", lambda: interpreted)
    monkeypatch.setattr(stream_graphs, "PiecewiseGraphs", lambda *given: given[-1])
    _, _, piecewise = stream_graphs.stream_graphs(RecordingCapture, compiles=compiles)
    assert piecewise(STREAMS, make_streams()) is chosen


def test_buckets_larger_than_every_batch_are_refused() -> None:
    site = make_site(attention=GatheredAttention, max_bs=2)
    ledger, streams = DecisionLedger(), make_streams()
    config = EngineConfig(graph="full", graph_buckets=(4, 8))
    site.runner.streams = streams
    with pytest.raises(ConfigError, match="no size for at most 2 requests"):
        capture(config, STREAMS, full(STREAMS, streams), site.runner, ledger, lambda done, total: None)


# -- the steps around
# --------------------------------------------------------------------------------------------------


def attend(tmp_path: Path, graph: str, explicit: str | None = None, facts: Facts = STREAMS, only: str = "") -> Any:
    """The attention that the bring-up step chooses, and the ledger's rows."""
    model = load(save(llama(), tmp_path))
    site, ledger = make_site(), DecisionLedger()
    pools = bring_up.Pools(site.table, site.cells, site.tokens)
    made = package()
    if only:
        object.__setattr__(made, "attention", {only: made.attention[only]})
    config = EngineConfig(graph=graph, attention_backend=explicit)
    kernels = bring_up.kernels(config, made, ledger, torch.device("cpu"))
    return bring_up.attention(config, made, facts, model, pools, kernels, None, ledger), ledger.rows


@pytest.mark.parametrize("graph", ["auto", "full"])
def test_captured_decode_prefers_attention_that_can_be_captured(tmp_path: Path, graph: str) -> None:
    backend, rows = attend(tmp_path, graph)
    assert type(backend) is GatheredAttention
    assert "reference refused: it lacks capture" in rows[-1].reason


def test_eager_decode_takes_the_preferred_attention(tmp_path: Path) -> None:
    assert type(attend(tmp_path, "off")[0]) is ReferenceAttention


def test_automatic_graphs_give_way_to_the_attention_that_was_asked_for(tmp_path: Path) -> None:
    assert type(attend(tmp_path, "auto", explicit="reference")[0]) is ReferenceAttention


@pytest.mark.parametrize("words", [{"explicit": "reference"}, {"only": "reference"}])
def test_explicit_graphs_do_not(tmp_path: Path, words: Any) -> None:
    with pytest.raises(ConfigError, match="it lacks capture"):
        attend(tmp_path, "full", **words)


def test_a_device_with_reference_attention_only_starts_eagerly_by_itself(tmp_path: Path) -> None:
    assert type(attend(tmp_path, "auto", only="reference")[0]) is ReferenceAttention


def test_kernels_may_be_the_reference_and_nothing_unknown() -> None:
    ledger = DecisionLedger()
    table = bring_up.kernels(EngineConfig(kernels="reference"), package(), ledger, torch.device("cpu"))
    assert set(table.origin.values()) and all("reference" in origin for origin in table.origin.values())
    assert ledger.rows[0].requested == "reference"
    with pytest.raises(ConfigError, match="'fast'; wanted one of auto, plain, reference"):
        bring_up.kernels(EngineConfig(kernels="fast"), package(), ledger, torch.device("cpu"))
