"""The vendor's attention over selected entries equals the reference, eagerly and in graphs.
Unsupported calls are refused with a reason, and defects are caught."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.conformance.inputs.kernel_inputs import Draw
from sglcore.conformance.inputs.kernel_inputs_sparse import sparse_mqa as inputs
from sglcore.conformance.law import LawBroken
from sglcore.conformance.laws.laws_kernels import RELATIVE, compare, relative_error
from sglcore.core.errors import ConfigError
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.kernel_choice import Refusals, fitted
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.table import KernelTable, Limited
from sglcore_npu import sparse
from sglcore_npu.facts import facts
from sglcore_npu.kernels import kernels
from tests.checkpoints import save
from tests.latent import deepseek_v32
from tests.laws.engine import TokenEngine, random_prompts

CONTEXT, PAGE = 160, 16
ROW = {"kv_lora_rank": sparse.LATENT, "qk_rope_head_dim": sparse.ROTATED, "index_head_dim": 128}
SMALL = {"num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
MOST = 0.02
"""Tolerance of nine in ten log-probabilities in float16. Entries or experts with nearly equal
scores may be selected differently, which changes some more, with the reference's kernels too. A
defect changes most."""


# -- the entry
# --------------------------------------------------------------------------------------------------


def hold(table: KernelTable) -> None:
    """Run the kit's law for the entry."""
    trial: Any = SimpleNamespace(case="sparse_mqa", note=lambda *seen: None, tolerance=RELATIVE.__getitem__)
    compare(trial, table, facts())


def test_the_operator_gives_what_the_reference_gives() -> None:
    assert kernels().candidates["sparse_mqa"][0].function is sparse.sparse_mqa
    hold(kernels())


@pytest.mark.parametrize("at_once", [1, 2])
@torch.inference_mode()
def test_rows_that_are_gathered_in_parts_are_those_that_are_gathered_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one token at a time, and with parts of two; the last part is smaller."""
    (given,) = (
        call for call in inputs(Draw(1, torch.float16), 3, True) if call[1].shape[1] == sparse.LATENT + sparse.ROTATED
    )
    monkeypatch.setattr(sparse, "GATHERED", at_once * given[2].shape[1] * given[1].shape[1])
    placed: list[Any] = [arg.to("npu:0") if isinstance(arg, torch.Tensor) else arg for arg in given]
    assert relative_error(sparse.sparse_mqa(*placed).cpu(), reference_sparse.sparse_mqa(*given)) < RELATIVE["float16"]


def row(*sizes: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Make a meta tensor for a call."""
    return torch.empty(1, *sizes, dtype=dtype, device="meta")


def attention(
    heads: int = 128,
    size: int = 576,
    value: int = 512,
    sinks: bool = False,
    bits: int = 16,
    dtype: torch.dtype = torch.float16,
) -> Any:
    """Return the arguments of a call of `sparse_mqa`."""
    kept = row(size, dtype=dtype) if bits == 16 else row(RowCodec(size, 64).num_bytes, dtype=torch.uint8)
    sinks_of = row(dtype=torch.float32).expand(heads) if sinks else None
    given = row(heads, size, dtype=dtype), kept, row(9, dtype=torch.int32), None, None, sinks_of, 1.0, value
    return (*given, None if bits == 16 else RowCodec(size, 64))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (attention(), ""),
        (attention(heads=1), ""),
        (attention(heads=24), "24 heads; it takes a power of two up to 128"),
        (attention(heads=256), "256 heads; it takes a power of two up to 128"),
        (attention(size=512), "rows of 512, values of 512; it takes 576, with values in the first 512"),
        (attention(sinks=True), "rows of two pools, or sinks; it takes one pool without sinks"),
        (
            attention(dtype=torch.float32),
            "it takes float16 or bfloat16 for both queries and rows, not rows of float32",
        ),
        (attention(bits=8), "it takes float16 or bfloat16 for both queries and rows, not rows of uint8"),
    ],
)
def test_what_the_operator_does_not_take_is_refused_by_its_reason(call: Any, reason: str) -> None:
    refusals = Refusals()
    table = fitted(kernels(), KernelTable.sparse_mqa, call, refusals)
    assert (table.sparse_mqa is sparse.sparse_mqa) == (not reason)
    found = [told.reason.partition("; found")[0] for told in refusals.rows() if told.downgrade]
    assert len(found) == bool(reason) and all(each.startswith(reason) for each in found)


DEFECTS = (
    ("lens = counts.clamp(min=1)", "lens = (counts - 1).clamp(min=1)"),
    ("(counts == 0).view(tokens, 1, 1), 0", "(counts < 0).view(tokens, 1, 1), 0"),
    ("query_rope=queries_turned", "query_rope=queries_turned * 0"),
    ("chosen[part], scale)", "chosen[part], 1.0)"),
    ("out[part] = _attend(q[part]", "out[part] = _attend(q[: len(q[part])].flip(0)"),
    ("places >= lens.unsqueeze(1), -1", "places < 0, -1"),
)


@pytest.mark.parametrize(("old", "new"), DEFECTS)
def test_a_defect_is_caught(old: str, new: str) -> None:
    text = Path(sparse.__file__).read_text()
    assert text.count(old) == 1
    defect = ModuleType("defect")
    exec(compile(text.replace(old, new), defect.__name__, "exec"), vars(defect))
    with pytest.raises((LawBroken, RuntimeError)):
        hold(kernels().replace(sparse_mqa=Limited(vars(defect)["sparse_mqa"], sparse.takes_sparse_mqa)))


# -- whole engines
# --------------------------------------------------------------------------------------------------


class Case:
    """A DeepSeek-V3.2 checkpoint with float16 weights and KV entries of the published size, and its
    oracle."""

    def __init__(self, folder: Path) -> None:
        self.oracle = deepseek_v32(**SMALL, **ROW)
        with torch.no_grad():
            for parameter in self.oracle.parameters():
                parameter.copy_(parameter.half().float())
        self.folder = save(self.oracle, folder)

    def engine(self, **settings: Any) -> TokenEngine:
        """Make an engine with this device's kernels; unwritten entries are NaN."""
        given = {"dtype": "float16", "page_size": PAGE, "max_model_len": CONTEXT, "poison": True, "kernels": "auto"}
        given |= {"max_batch_tokens": 24, "graph_token_buckets": (24,), "attention_backend": None, "max_requests": 4}
        return TokenEngine(self.folder, scramble_pages=3, **{**given, **settings})

    def error_of_most(self, engine: TokenEngine) -> float:
        """Return the 90th percentile of the differences of log-probabilities to transformers'. The
        prompts are ragged, chunked and staggered, with more tokens than are selected."""
        errors: list[float] = []
        for result in engine.run(random_prompts(5, (3, 19, 90)), 6, score_prompts=True, stagger=2):
            ids = result.prompt + result.tokens
            with torch.no_grad():
                wanted = self.oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
            found = torch.tensor([*result.prompt_logprobs, *result.logprobs])
            errors += (found - wanted[torch.arange(len(ids) - 1), ids[1:]]).abs().tolist()
        return float(np.quantile(errors, 0.9))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("graph", ["off", "full", "breakable"])
def test_a_model_with_rows_of_the_published_size_runs_on_the_operator_as_transformers_does(
    case: Case, graph: str
) -> None:
    engine = case.engine(graph=graph)
    assert engine.worker.runner.attn_backend.kernels.sparse_mqa is sparse.sparse_mqa
    assert case.error_of_most(engine) < MOST
    assert {path.partition(":")[0] for path in engine.paths} >= ({"eager"} if graph == "off" else {"full", graph})


def forgets_places(q: torch.Tensor, *more: Any) -> torch.Tensor:
    """`sparse_mqa` without the rotary part of queries."""
    return sparse.sparse_mqa(torch.cat((q[..., : sparse.LATENT], q[..., sparse.LATENT :] * 0), dim=-1), *more)


def test_a_broken_operator_is_not_transformers(case: Case) -> None:
    engine = case.engine(graph="off")
    backend = engine.worker.runner.attn_backend
    backend.kernels = backend.kernels.replace(sparse_mqa=forgets_places)
    assert case.error_of_most(engine) > 5 * MOST


def test_rows_in_host_memory_are_refused_by_name_before_loading(case: Case, tmp_path: Path) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="hisparse is requested, and kernels on npu:0 do not reach host memory"):
        TokenEngine(tmp_path, graph="off", hisparse="on")
