"""Size the KV pools: from the device's free memory, the model's bytes per token, and the
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.step.slice_decisions import slice_budget
from sglcore.worker.model_worker import least_shared_pages, most_window_pages, reserved_windows

GIB = 1 << 30

SNAPSHOTS = 4
"""Default number of state snapshots for each request that may run."""
CACHED_WINDOWS = 1
"""Windows in the prefix cache for each request that may run. A text that was continued once may be
continued again.
"""


MOST_WASTE = 0.25
"""With `kv_memory` "auto", pages share memory if at most this share of a window page is in storage
that no sliding-window layer uses.
"""


def size_text(count: int) -> str:
    """Return a byte count as text, such as "1.50 GiB" or, below 1 GiB, "12.0 MiB"."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of device memory. `available` may still be allocated; the text `evidence` says where
    the figures come from. `default_share`, a fraction of `available`, is used if the configuration
    gives no size.
    """

    total: int
    available: int
    evidence: str
    default_share: float = 0.85


@dataclass(frozen=True, slots=True)
class Geometry:
    """Bytes that the layers of a model keep.

    - `page`: of one page, in layers that keep all tokens.
    - `window_page`: of one page, in layers that keep only the last `window` tokens (0: none).
    - `state`: of one request, independent of its length.
    - `ring`: the same, but not part of snapshots.
    - `host_page`: of one page in host memory, which holds at most `host_ratio` times the pages that
      fit on the device.
    """

    page: int
    window_page: int = 0
    window: int = 0
    state: int = 0
    ring: int = 0
    host_page: int = 0
    host_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """How window pages can take the memory of pages of all tokens.

    `unit`: pages of all tokens that become one window page (0: they cannot share memory, and
    `reason` says why). `windows` and `full`: number of layers of each kind.
    """

    unit: int
    reason: str
    windows: int = 0
    full: int = 0

    @property
    def waste(self) -> float:
        """The share of a window page's memory that no layer uses."""
        return 1 - self.windows / (self.unit * self.full) if self.unit else 0.0


NO_SHARING = Sharing(0, "this worker does not keep window pages, so all pages are of one kind")


class KeptBytes(TypedDict):
    """Bytes of each kind of memory, by their names in `Limits`."""

    kv_bytes: int
    window_bytes: int
    state_bytes: int
    snapshot_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Sizes of all pools and tables, which `size_pools` chooses: numbers of KV pages, window pages,
    requests and snapshots, tokens per page, and the longest context."""

    page_size: int
    """Tokens per page."""
    num_pages: int
    """Number of KV pages."""
    max_model_len: int
    """Maximum tokens of a request."""
    max_requests: int
    """Maximum running requests, each with a request slot and a state."""
    num_snapshots: int = 0
    """Number of snapshots, in addition to the states of the request slots."""
    window: int = 0
    """The longest sliding window in tokens."""
    num_window_pages: int = 0
    """Number of sliding-window pages. 0: sliding-window layers keep all tokens, in the pages of the
    other layers."""
    window_unit: int = 0
    """Pages that become one sliding-window page, if both kinds share memory, as in `Limits`; they
    have numbers up to `num_pages`, and `num_window_pages` is the most that there can be. 0: each
    kind has memory of its own."""
    geometry: Geometry = field(default=Geometry(0), compare=False)
    """Bytes of what was sized."""
    hisparse: HiSparseConfig | None = field(default=None, compare=False)
    """The setting of HiSparse that was sized. None: all KV entries are on the device."""

    @property
    def num_bytes(self) -> KeptBytes:
        """Bytes of each kind of memory. One state is for padding rows."""
        kept = self.geometry
        page = kept.page + (0 if self.num_window_pages else kept.window_page)
        return {
            "kv_bytes": self.num_pages * page,
            "window_bytes": 0 if self.window_unit else self.num_window_pages * kept.window_page,
            "state_bytes": (self.max_requests + 1) * (kept.state + kept.ring),
            "snapshot_bytes": self.num_snapshots * kept.state,
            "host_bytes": self.num_pages * kept.host_page,
        }


def size_pools(
    config: EngineConfig,
    *,
    context_len: int,
    geometry: Geometry,
    page_size: int,
    budget: MemoryBudget,
    ledger: DecisionLedger,
    sharing: Sharing = NO_SHARING,
) -> MemorySizes:
    """Choose the number of requests, limited by their states, then the window pages, pages and
    context. Records each choice in the ledger.

    `context_len` is the model's own, in tokens. `sharing` says whether both kinds of pages can
    share memory. A request of the chosen `max_model_len` always fits. Raises ConfigError if the
    configuration does not fit.
    """
    max_model_len = config.max_model_len or context_len
    given, allowed = config.kv_cache_memory, _allowed(config, budget)
    if given is not None and given > budget.available:
        raise ConfigError(
            f"kv_cache_memory is {size_text(given)}, {size_text(budget.available)} are available",
            remedy="lower it, or leave it out",
        )
    states = _no_states(config)
    if geometry.state or geometry.ring:
        room = allowed // 2 if given is None else budget.available - given
        states = _size_states(config, geometry, room, ledger)
        allowed -= 0 if given is not None else states.num_bytes
    shared = _Shared(config, geometry, sharing, states.max_requests, max_model_len, page_size, allowed)
    if shared.is_chosen(ledger):
        return shared.sizes(states, budget, ledger)
    window_pages = _size_windows(config, geometry, states.max_requests, max_model_len, page_size, allowed, ledger)
    window_bytes = window_pages * geometry.window_page
    allowed -= window_bytes
    page_bytes = geometry.page if window_pages else geometry.page + geometry.window_page
    useful = states.max_requests * -(-max_model_len // page_size)
    num_pages = min(useful, allowed // page_bytes) if page_bytes else useful
    if geometry.host_page:
        num_pages = min(num_pages, int(geometry.host_ratio * (allowed // (page_bytes + geometry.host_page))))
    needed = -(-max_model_len // page_size)
    if num_pages < needed:
        wanted = needed * page_bytes + window_bytes
        max_model_len = _shorter_context(config, num_pages * page_size, max_model_len, wanted, ledger)
        num_pages = -(-max_model_len // page_size)
        useful = states.max_requests * num_pages
    what = f"{num_pages} pages of {page_size} tokens, {size_text(num_pages * page_bytes)}"
    reason = f"{budget.evidence}; {states.max_requests} requests of {max_model_len} tokens need {useful} pages"
    ledger.record(Row("kv cache", _asked_text(config), what, reason, "set kv_cache_memory or memory_fraction"))
    requests = states.max_requests
    if num_pages < requests:
        requests = num_pages
        _tell_fewer(config, requests, f"each needs at least one of {num_pages} pages", "raise kv_cache_memory", ledger)
    window = geometry.window if window_pages else 0
    counts = page_size, num_pages, max_model_len, requests, states.num_snapshots, window, window_pages
    return MemorySizes(*counts, geometry=geometry)


def _allowed(config: EngineConfig, budget: MemoryBudget) -> int:
    """Return the bytes that may be allocated: `kv_cache_memory`, or `memory_fraction` of all memory
    minus the memory in use, or the default share of the free memory.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if config.memory_fraction is not None:
        return max(int(budget.available - budget.total * (1 - config.memory_fraction)), 0)
    return int(budget.available * budget.default_share)


def _asked_text(config: EngineConfig) -> str:
    if config.kv_cache_memory is not None:
        return size_text(config.kv_cache_memory)
    return "auto" if config.memory_fraction is None else f"within {config.memory_fraction:g} of all memory"


@dataclass(frozen=True, slots=True)
class _States:
    """The number of requests that fit with their states, the number of snapshots, and the bytes of
    both.
    """

    max_requests: int
    num_snapshots: int
    num_bytes: int


def _no_states(config: EngineConfig) -> _States:
    return _States(config.max_requests, 0, 0)


def _size_states(config: EngineConfig, geometry: Geometry, room: int, ledger: DecisionLedger) -> _States:
    """Size the states in `room` bytes: one for each request and one for padding rows. Snapshots get
    the rest. Raises ConfigError if two states do not fit, or the configured snapshots do not.
    Records the choices in the ledger.
    """
    each = geometry.state + geometry.ring
    requests = min(config.max_requests, room // each - 1)
    if requests < 1:
        raise ConfigError(
            f"the state of one request takes {size_text(each)}, and padding needs one more; "
            f"{size_text(max(room, 0))} are "
            "left for both",
            remedy="free memory, or lower kv_cache_memory",
        )
    if requests < config.max_requests:
        _tell_fewer(
            config, requests, f"{size_text(room)} hold {requests} states and one for padding", "free memory", ledger
        )
    taken = (requests + 1) * each
    what = f"{size_text(each)} per request, {size_text(taken)} for {requests}"
    ledger.record(
        Row("states", "auto", what, "memory per request that does not depend on its length", "set max_requests")
    )
    if not geometry.state:
        return _States(requests, 0, taken)
    snapshots = _size_snapshots(config, geometry.state, requests, room - taken, ledger)
    return _States(requests, snapshots, taken + snapshots * geometry.state)


def _size_snapshots(config: EngineConfig, each: int, requests: int, left: int, ledger: DecisionLedger) -> int:
    """Return the number of snapshots of `each` bytes: as configured, or a quarter of the `left`
    bytes and at most SNAPSHOTS for each request; 0 without a prefix cache. Raises ConfigError if
    the configured memory is larger than `left`.
    """
    asked = config.snapshot_memory
    if asked is not None and asked > left:
        raise ConfigError(
            f"snapshot_memory is {size_text(asked)}, {size_text(left)} are left after the states of {requests} "
            "requests",
            remedy="lower it, lower max_requests, or leave it out",
        )
    count = min(SNAPSHOTS * requests, left // 4 // each) if asked is None else asked // each
    reason = "copies of states from which prefix-cache hits and preempted requests continue"
    if not config.prefix_cache:
        count, reason = 0, "the prefix cache is off"
    what = f"{count} of {size_text(each)}, {size_text(count * each)}"
    asked_text = "auto" if asked is None else size_text(asked)
    ledger.record(Row("snapshots", asked_text, what, reason, "set snapshot_memory"))
    return count


def _size_windows(
    config: EngineConfig,
    geometry: Geometry,
    requests: int,
    max_model_len: int,
    page_size: int,
    allowed: int,
    ledger: DecisionLedger,
) -> int:
    """Return the number of window pages; 0 if the model has no sliding window, or if a common pool
    holds a longer context.

    The number is the least of: what all requests and the prefix cache can use, half of `allowed`,
    the number of KV pages, and what leaves room for one whole context. It is at least what one
    request needs.
    """
    window = geometry.window
    if not window:
        return 0
    page_bytes, full_bytes = geometry.window_page, geometry.page
    longest = -(-max_model_len // page_size)
    least = most_window_pages(window, config.max_batch_tokens, page_size)
    in_one, left = allowed // (page_bytes + full_bytes), allowed - least * page_bytes
    in_two = left // full_bytes if full_bytes else longest * (left >= 0)
    if in_two < longest and in_two <= in_one:
        what = f"{size_text(allowed)} hold a longer context without separate window pages"
        ledger.record(Row("window cache", "auto", "none", what, "set kv_cache_memory, or lower max_batch_tokens"))
        return 0
    useful = _useful_windows(config, window, requests, longest, page_size)
    half = allowed // (page_bytes + (max(page_bytes, full_bytes) if full_bytes else 0))
    beside_one = (allowed - longest * full_bytes) // page_bytes
    count = max(least, min(useful, half, beside_one))
    cached = f" and of {CACHED_WINDOWS * requests} texts in the prefix cache" if config.prefix_cache else ""
    reason = f"the last {window} tokens of {requests} requests{cached}, and the tokens of one step, need {useful} pages"
    what = f"{count} pages of {page_size} tokens, {size_text(count * page_bytes)}"
    ledger.record(Row("window cache", "auto", what, reason, "set kv_cache_memory, max_requests or max_batch_tokens"))
    return count


def _useful_windows(config: EngineConfig, window: int, requests: int, longest: int, page_size: int) -> int:
    """Return the number of window pages that all requests, the prefix cache and the tokens of one
    step can use. `window` is in tokens, `longest` in pages.
    """
    each = -(-(window - 1) // page_size) + 2
    windows = requests * (1 + (CACHED_WINDOWS if config.prefix_cache else 0))
    return min(windows * each + -(-config.max_batch_tokens // page_size), requests * longest)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The sizes of a memory that both kinds of pages share, in `allowed` bytes."""

    config: EngineConfig
    """The configuration."""
    geometry: Geometry
    """Bytes of each kind of page."""
    sharing: Sharing
    """Whether, and how, the layers can share memory."""
    requests: int
    """Number of requests that may run, by their states."""
    max_model_len: int
    """Maximum tokens of a request."""
    page_size: int
    """Tokens per page."""
    allowed: int
    """Bytes that may be allocated for pages."""

    def is_chosen(self, ledger: DecisionLedger) -> bool:
        """Return whether pages share memory. If they could, records the choice. Raises ConfigError
        if the configuration asks for it and it is not possible.
        """
        asked, why = self.config.kv_memory, self._against()
        if asked == "shared" and why:
            remedy = "leave --kv-memory out, or raise kv_cache_memory" if self.sharing.unit else "leave --kv-memory out"
            raise ConfigError(f"kv_memory is shared; {why}", wanted="auto or split", remedy=remedy)
        if not self.sharing.unit:
            return False
        if asked == "auto" and not why and self.sharing.waste > MOST_WASTE:
            why = f"shared pages would waste {self.sharing.waste:.0%} of each window page ({self.sharing.reason})"
        if asked == "split" or why:
            ledger.record(Row("kv memory", asked, "split", why or "requested", "--kv-memory shared"))
            return False
        ledger.record(Row("kv memory", asked, "shared", self._reason(), "--kv-memory split"))
        return True

    def sizes(self, states: _States, budget: MemoryBudget, ledger: DecisionLedger) -> MemorySizes:
        """Return the sizes and record them."""
        pages, unit, requests = self._num_pages, self.sharing.unit, self.requests
        size = size_text(pages * self.geometry.page)
        what = f"{pages} pages of {self.page_size} tokens for all layers, {size}"
        useful = requests * self._longest
        reason = (
            f"{budget.evidence}; {requests} requests of {self.max_model_len} tokens need {useful} pages and "
            f"{self._useful_windows} window pages of {unit} each"
        )
        ledger.record(Row("kv cache", _asked_text(self.config), what, reason, "set kv_cache_memory or memory_fraction"))
        if pages // (1 + unit) < requests:
            requests = pages // (1 + unit)
            why = f"each needs at least one page and one window page of {pages} pages"
            _tell_fewer(self.config, requests, why, "raise kv_cache_memory", ledger)
        counts = self.page_size, pages, self.max_model_len, requests, states.num_snapshots
        return MemorySizes(*counts, self.geometry.window, (pages + 1) // unit - 1, unit, self.geometry)

    @property
    def _longest(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def _listed(self) -> int:
        """The most window pages of one request."""
        return most_window_pages(self.geometry.window, self.config.max_batch_tokens, self.page_size)

    @property
    def _useful_windows(self) -> int:
        return _useful_windows(self.config, self.geometry.window, self.requests, self._longest, self.page_size)

    @property
    def _num_pages(self) -> int:
        """The highest page number: what fits, or what all requests can use if that is less."""
        unit = self.sharing.unit
        fitting = (self.allowed // self.geometry.page + 1) // unit - 1
        windows = self._useful_windows + reserved_windows(self._listed, unit)
        useful = -(-self.requests * self._longest // unit) + max(windows, self._listed)
        return unit * (min(fitting, useful) + 1) - 1

    def _against(self) -> str:
        """Return why pages cannot share memory; empty if they can."""
        if not self.sharing.unit:
            return self.sharing.reason
        if slice_budget(self.config.prompt_slices) is not None:
            return "not yet with --prompt-slices: a sliced prompt keeps the window pages of all its tokens meanwhile"
        least = least_shared_pages(self._longest, self._listed, self.sharing.unit)
        if self._num_pages >= least:
            return ""
        return (
            f"{size_text(self.allowed)} hold {max(self._num_pages, 0)} shared pages; one request of "
            f"{self.max_model_len} tokens and its windows need {least}"
        )

    def _reason(self) -> str:
        """Say what shares memory, and what the pools would be without."""
        given = self.config, self.geometry, self.requests, self.max_model_len, self.page_size, self.allowed
        windows = _size_windows(*given, DecisionLedger())
        page = self.geometry.page + (0 if windows else self.geometry.window_page)
        left = self.allowed - windows * self.geometry.window_page
        pages = min(self.requests * self._longest, left // page)
        unused = f", {self.sharing.waste:.0%} of it unused" if self.sharing.waste else ""
        return (
            f"{self.sharing.reason}; a window page takes {self.sharing.unit} of the pages{unused}; split, there would "
            f"be {pages} pages and {windows} window pages"
        )


def _tell_fewer(config: EngineConfig, count: int, reason: str, remedy: str, ledger: DecisionLedger) -> None:
    was_asked = "max_requests" in config.sources
    ledger.record(
        Row("requests", str(config.max_requests), str(count), reason, f"{remedy}, or lower max_requests", was_asked)
    )


def _shorter_context(config: EngineConfig, tokens: int, wanted: int, needed_bytes: int, ledger: DecisionLedger) -> int:
    """Return `tokens`, the context that fits where `wanted` tokens do not, and record the
    downgrade. Raises ConfigError if the context was configured, or if no token fits.
    """
    if config.max_model_len is not None or tokens < 1:
        raise ConfigError(
            f"the KV memory holds {tokens} tokens, one request of {wanted} tokens needs {size_text(needed_bytes)}",
            remedy="lower max_model_len or raise kv_cache_memory",
        )
    ledger.record(
        Row(
            "context",
            str(wanted),
            str(tokens),
            f"the KV memory holds {tokens} tokens",
            f"free memory, or set kv_cache_memory to at least {needed_bytes} bytes",
            downgrade=True,
        )
    )
    return tokens
