"""The weights of a model while it is built: taken from the checkpoint by name without reading, then
read one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx

from sglcore.checkpoint.safetensors_header import Entry
from sglcore.core.errors import CheckpointError
from sglcore_mlx.layers.cut import Cut
from sglcore_mlx.layers.quantization import Quantization

FLOATS = ("F32", "F16", "BF16")


class Weights:
    """The tensors of a checkpoint, lazily. A model takes each once (`take` casts to `dtype`,
    `take_raw` does not) and passes what it makes of it to `keep`; `read` reads what was kept.

    A tensor that is missing, or was taken before, gives zeros; `check` raises CheckpointError for
    those, and for tensors that nothing has taken. `has_offsets`: the offset that models
    add to norm weights is already included, as in checkpoints that mlx_lm wrote (recognised by
    their transposed convolutions).
    """

    __slots__ = (
        "_arrays",
        "_entries",
        "_forms",
        "_kept",
        "_missing",
        "_views",
        "cuts",
        "dtype",
        "has_offsets",
        "quantization",
        "zeroed",
    )

    def __init__(
        self,
        entries: Mapping[str, Entry],
        arrays: Mapping[str, mx.array],
        dtype: mx.Dtype,
        quantization: Quantization | None,
    ) -> None:
        self.dtype = dtype
        self.quantization = quantization
        self.has_offsets = any(_is_turned(entry) for entry in entries.values())
        self.cuts: dict[str, Cut] = {}
        """This rank's part of tensors, by name; those without one are whole."""
        self.zeroed: set[str] = set()
        """Names of tensors that are zeros on this rank."""
        self._entries = dict(entries)
        self._arrays = dict(arrays)
        self._kept: list[mx.array] = []
        self._views: list[mx.array] = []
        self._missing: list[str] = []
        self._forms: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor `name` and it was not taken yet."""
        return name in self._entries

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the checkpoint's shape of a tensor that was not taken yet; None if it was taken or
        is missing."""
        return self._entries[name].shape if name in self._entries else None

    def take(self, name: str, *shape: int, dtype: mx.Dtype | None = None) -> mx.array:
        """Take a floating-point weight and return it, lazily, in `dtype` (None: the model's). A
        missing one gives zeros, which `check` reports. Raises `CheckpointError` for another shape,
        or a stored type other than F32, F16 and BF16."""
        return self._take(name, shape, FLOATS).astype(dtype or self.dtype)

    def take_raw(self, name: str, dtype: str, *shape: int) -> mx.array:
        """Take a tensor as stored and return it, lazily; `dtype` is the file's name of its type,
        such as "U32". A missing one gives zeros, which `check` reports. Raises `CheckpointError`
        for another shape or type."""
        return self._take(name, shape, (dtype,))

    def take_integers(self, name: str, *shape: int) -> mx.array:
        """Take a tensor stored as I64 or I32 and return it, lazily. A missing one gives zeros,
        which `check` reports. Raises `CheckpointError` for another shape or type."""
        return self._take(name, shape, ("I64", "I32"))

    def keep(self, array: mx.array) -> mx.array:
        """Register an array as a weight of the model and return it: `read` evaluates it,
        `num_bytes` counts it."""
        self._kept.append(array)
        return array

    def view(self, array: mx.array) -> mx.array:
        """Register a view of kept weights and return it: `read` evaluates it too, `num_bytes` does
        not count it."""
        self._views.append(array)
        return array

    def note_form(self, form: str) -> None:
        """Note that a weight is quantised in this format, given as text, for `forms`."""
        self._forms.add(form)

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept weights."""
        return sum(array.nbytes for array in self._kept)

    @property
    def forms(self) -> str:
        """The weights' quantisation formats as text, separated by semicolons; "none" if there are
        none."""
        return "; ".join(sorted(self._forms)) or "none"

    def check(self, is_harmless: Callable[[str], object]) -> None:
        """Raise `CheckpointError` if a tensor was taken that the checkpoint lacks, or if one was
        not taken that `is_harmless` does not excuse: it gets the model's name of the tensor and
        returns a true value to ignore it."""
        if self._missing:
            raise CheckpointError(
                f"{_some(self._missing)} not in the checkpoint", remedy="check config.json, or download it again"
            )
        unknown = [entry.name for name, entry in self._entries.items() if not is_harmless(name)]
        if unknown:
            raise CheckpointError(
                f"the checkpoint has {_some(unknown)}, which this architecture does not use",
                remedy="check that config.json belongs to these weights",
            )

    def read(self, progress: Callable[[int, int], None]) -> None:
        """Read the kept weights one after the other, waiting for each, so that at most one is in
        memory twice. After each, `progress(bytes read so far, bytes of all)` is called on this
        thread; an exception that it raises stops the reading. Nothing can be taken afterwards."""
        self._arrays.clear()
        total, done = self.num_bytes, 0
        for array in self._kept:
            mx.eval(array)
            done += array.nbytes
            progress(done, total)
        mx.eval(self._views)

    def _take(self, name: str, shape: Sequence[int], dtypes: Iterable[str]) -> mx.array:
        entry, array = self._entries.pop(name, None), self._arrays.pop(name, None)
        if entry is None or array is None:
            self._missing.append(name)
            return mx.zeros(shape)
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.name!r} in {entry.file.name} has the type {entry.dtype}",
                wanted=f"one of {', '.join(dtypes)}",
                remedy="use the unquantised version of this model, or one that mlx_lm.convert made",
            )
        cut = self.cuts.get(name)
        wanted = tuple(shape) if cut is None else cut.shape(shape, entry.shape)
        if entry.shape != wanted:
            raise CheckpointError(
                f"{entry.name!r} in {entry.file.name} has the shape {list(entry.shape)}",
                wanted=f"{list(wanted)} as config.json implies",
                remedy="check that config.json belongs to these weights",
            )
        own = array if cut is None else cut.of(array, shape)
        return mx.zeros_like(own) if name in self.zeroed else own


def _is_turned(entry: Entry) -> bool:
    """Return whether it is a convolution in MLX's layout [channels, taps, 1], instead of [channels,
    1, taps]."""
    return entry.name.endswith(".conv1d.weight") and entry.shape[1] != 1


def _some(names: Sequence[str], shown: int = 8) -> str:
    listed = ", ".join(repr(name) for name in names[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
