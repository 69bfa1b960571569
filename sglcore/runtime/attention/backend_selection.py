"""Select the attention backend: the first candidate with the needed capabilities.

Every refusal has a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, SglcoreError, one_line
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, Ref, resolve
from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionShape, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.kv_rows import ROWS
from sglcore.runtime.memory.pools import CELL_MAJOR, KVPool
from sglcore.step.batch_field import spec_of

OF_ROWS: Mapping[str, Ref] = MappingProxyType(
    {
        "latent": "sglcore.runtime.attention.sparse.latent:DeepseekSparseAttnBackend",
        "compressed": "sglcore.runtime.attention.sparse.compressed:DeepseekV4AttnBackend",
    }
)
"""Device-independent backends for KV rows, used after the package's own candidates."""


FROZEN = "frozen"
"""The feature of layers with queries only.

It needs a backend that reads keys and values from KV slots.
"""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the model and the configuration need from a backend. `refusal` compares it with the
    backend's `AttentionFacts`.
    """

    head_dims: tuple[int, ...]
    """Elements of a head, of all layers, ascending."""
    page_size: int
    """Tokens in a page."""
    dtype: str
    """The element type in which the model computes, such as "bfloat16"."""
    features: frozenset[str]
    """Features beyond causal attention over pages."""
    index_dtype: str = "int64"
    """The type of KV slot indices."""
    padding_len: int = 1
    """The sequence length of padding rows."""
    layout: str = CELL_MAJOR
    """The layout of the pool."""
    verifies: bool = False
    """Draft tokens are verified, or made: some rows have upper bounds of their lengths."""


def shape_of(layers: Sequence[Attention], is_encoder: bool) -> AttentionShape:
    """Return what these layers of a model need from a backend: the largest head count, (KV heads,
    head_dim) of every layer in order, and the distinct windows, softcaps and features.

    `is_encoder`: the model embeds and does not decode.
    """
    return AttentionShape(
        max((layer.num_heads for layer in layers), default=1),
        tuple((layer.num_kv_heads, layer.head_dim) for layer in layers),
        tuple(dict.fromkeys(layer.sliding_window for layer in layers)) or (None,),
        is_encoder,
        frozenset[str]().union(*(layer.features for layer in layers)),
        tuple(dict.fromkeys(layer.softcap for layer in layers)) or (None,),
    )


def refusal(facts: AttentionFacts, needs: AttentionNeeds) -> str:
    """Return why a backend with these facts cannot serve these needs; empty if it can."""
    if facts.page_sizes is not None and needs.page_size not in facts.page_sizes:
        return f"pages of {needs.page_size} tokens; it takes {', '.join(map(str, facts.page_sizes))}"
    for head_dim in needs.head_dims:
        if facts.head_dims is not None and head_dim not in facts.head_dims:
            return f"heads of {head_dim}; it takes {', '.join(map(str, facts.head_dims))}"
    if facts.dtypes is not None and needs.dtype not in facts.dtypes:
        return f"dtype {needs.dtype}; it takes {', '.join(facts.dtypes)}"
    if facts.index_dtype not in (None, needs.index_dtype):
        return f"KV slot indices of {needs.index_dtype}; it takes {facts.index_dtype}"
    if facts.padding_len != needs.padding_len:
        return f"padding rows of length {needs.padding_len}; it wants {facts.padding_len}"
    if not facts.takes_layout(needs.layout):
        return f"keys and values laid out {needs.layout}; it takes {', '.join(facts.layouts or ())}"
    if needs.verifies and not facts.takes_bounds:
        return "upper bounds of lengths on the host, which speculation gives; it takes exact ones for all rows"
    if FROZEN in needs.features and not facts.takes_stored:
        return "queries alone; it takes them with keys and values"
    missing = sorted(needs.features - facts.features - {FROZEN})
    return f"it lacks {', '.join(missing)}" if missing else ""


class Tried(Protocol):
    """Tries a backend that calls a library, before a model is given it."""

    def __call__(self, backend: type[AttentionBackend], captured: bool) -> str:
        """Return how the backend fails, empty if it does not. `captured`: graphs capture it too."""
        ...


def select_attention(
    candidates: Mapping[str, Ref],
    needs: AttentionNeeds,
    explicit: str | None,
    package: str,
    ledger: DecisionLedger,
    whom: str = "the model",
    tried: Callable[[type[AttentionBackend]], str] | None = None,
) -> type[AttentionBackend]:
    """Return the first candidate class that serves the needs of `whom` (a noun for messages);
    record it in the ledger. `package` is the device package's name.

    `tried` returns how a candidate that calls a library fails, or an empty text; others are not
    tried. An explicit choice is used or refused, never replaced. A candidate with a missing or
    failing library is refused with the error as the reason. Raises ConfigError if no candidate
    serves or the explicit one is not a candidate.
    """
    if explicit is not None and explicit not in candidates:
        raise ConfigError(
            f"attention backend {explicit!r} is not offered by device {package!r}",
            wanted=f"one of {', '.join(candidates)}",
        )
    refused: list[str] = []
    for name in (explicit,) if explicit is not None else candidates:
        backend, reason = _consider(candidates[name], needs, package)
        if backend is not None and not reason and backend.facts.library and tried is not None:
            reason = tried(backend)
        if backend is not None and not reason:
            said = [f"requested; serves {whom}"] if explicit else [f"first that serves {whom}", *refused]
            why = "; ".join([*said, *filter(None, (backend.remark(),))])
            ledger.record(Row("attention", explicit or "auto", name, why, "choose with --attention-backend"))
            return backend
        refused.append(f"{name} refused: {reason}")
    raise ConfigError(
        f"no attention backend of device {package!r} serves {whom}: {'; '.join(refused)}",
        remedy="choose another --attention-backend, page size or dtype",
    )


def choose_attention(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    dtype: str,
    shape: AttentionShape,
    cells: KVPool,
    whom: str,
    ledger: DecisionLedger,
    tried: Tried | None = None,
) -> type[AttentionBackend]:
    """Return the first backend class that serves a shape over the pool `cells`, and record it in
    the ledger: the device package's candidates first, then `OF_ROWS` for KV rows. `tried` tries one
    that calls a library.

    If stream graphs are configured for a model that decodes, it must also support capture; with
    `config.graph` "auto", one without capture is taken if no other serves. Raises as
    `select_attention` does.
    """
    captured = facts.has_streams and facts.graph_kind(config.graph) != "off" and not shape.is_encoder
    needs = AttentionNeeds(
        tuple(sorted({head_dim for _, head_dim in shape.layers})),
        cells.page_size,
        dtype.removeprefix("torch."),
        shape.features | ({"capture"} if captured else set()),
        facts.index_dtype,
        int(spec_of(ForwardBatch, "seq_lens").padding.value),
        cells.layout,
        shape.has_bounds,
    )
    # Candidates after the package's own; they do not replace a candidate of the same name.
    offered = {**package.attention, **(OF_ROWS if cells.layout == ROWS else {}), **package.attention}

    def select(needs: AttentionNeeds, captured: bool) -> type[AttentionBackend]:
        trial = None if tried is None else partial(tried, captured=captured)
        return select_attention(offered, needs, config.attention_backend, package.name, ledger, whom, trial)

    try:
        return select(needs, captured)
    except ConfigError:
        if not captured or config.graph != "auto":
            raise
        # Graphs are optional with `auto`: a backend without capture is better than none.
        return select(replace(needs, features=shape.features), captured=False)


def _consider(ref: Ref, needs: AttentionNeeds, package: str) -> tuple[type[AttentionBackend] | None, str]:
    try:
        backend = resolve(ref, package)
    except Unavailable as error:
        return None, str(error)
    except ImportError as error:
        return None, f"{error}; install the library it needs"
    except SglcoreError:
        raise
    except Exception as error:
        return None, f"{one_line(error)}; its library does not fit, install the one that the package names"
    try:
        reason = backend.unavailable()
    except Exception as error:
        reason = one_line(error)
    return backend, reason or refusal(backend.facts, needs)
