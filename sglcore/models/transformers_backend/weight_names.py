"""Maps the tensor names of a checkpoint's files to those of transformers' class, by transformers'
own renamings.

Experts that the files have one by one, and weights that the class concatenates, become views of the
class's stacked weight: each is read straight into its part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from sglcore.core.errors import ConfigError
from sglcore.models.weights.formats.format_registry import FORMATS

_WEIGHT = "weight"
_QUANTIZED = frozenset(suffix for form in FORMATS.values() for suffix in (*form.needs, *form.may_have)) - {_WEIGHT}
"""Tensors that quantised layers have in addition to, or instead of, a weight."""
_STACKED = ((MergeModulelist,), (MergeModulelist, Concatenate))
"""Stacking conversions: experts stacked; or several weights of each expert concatenated, and the
experts stacked."""


class Naming:
    """Callable that maps the tensor names in a checkpoint's files to the names in one transformers
    class. `targets`: the class's weights by name; a call replaces a stacked or concatenated weight
    in it by views of its parts, if the files have the parts."""

    def __init__(self, model: PreTrainedModel, targets: dict[str, Tensor]) -> None:
        found = get_model_conversion_mapping(model)
        self._renamings = [each for each in found if isinstance(each, WeightRenaming)]
        self._converters = [each for each in found if isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        # Names only: tensors are freed as they are packed.
        self._known = dict.fromkeys(targets, True)
        self._targets = targets

    def __call__(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Return the name in `targets` of each tensor in the files. Stacked weights in `targets`
        are replaced by their parts if the files have those. Raises `ConfigError` for weights that
        transformers computes by any other conversion."""
        renamed = {name: self._rename(name) for name in shapes}
        found = {renamed[name]: shape for name, shape in shapes.items()}
        for name in dict.fromkeys(self._of_weight(name) for name in found):
            if name not in self._targets:
                self._split(name, found)
        return renamed

    def _rename(self, name: str) -> str:
        """Return the class's name of a tensor. The class knows only weights: other tensors of a
        quantised layer are renamed as its weight is."""
        weight = self._of_weight(name)
        found = rename_source_key(weight, self._renamings, [], self._prefix, self._known)[0]
        return found if weight == name else found.removesuffix(_WEIGHT) + name.rpartition(".")[2]

    def _of_weight(self, name: str) -> str:
        """Return the name of the weight that a quantised layer's tensor belongs to; any other name
        unchanged."""
        module, _, suffix = name.rpartition(".")
        return f"{module}.{_WEIGHT}" if suffix in _QUANTIZED and name not in self._known else name

    def _split(self, name: str, found: Mapping[str, tuple[int, ...]]) -> None:
        """If a converter of transformers makes a stacked or concatenated weight from this name,
        replace that weight in `targets` by views of its parts. Raises `ConfigError` for any other
        conversion."""
        for converter in self._converters:
            stacked, pattern = converter.rename_source_key(name)
            if pattern is None or stacked not in self._known:
                continue
            match converter.operations:
                case [Concatenate(dim=dim)]:
                    return self._cut(stacked, name, converter, pattern, found, dim)
            if tuple(map(type, converter.operations)) not in _STACKED:
                raise ConfigError(
                    f"{name!r} becomes {stacked!r} by a conversion that is not supported",
                    remedy=(
                        "save the model with transformers' save_pretrained(save_original_format=False), or "
                        "use another one"
                    ),
                )
            self._replace(stacked, name, converter, pattern)

    def _cut(
        self,
        stacked: str,
        name: str,
        converter: WeightConverter,
        pattern: str,
        found: Mapping[str, tuple[int, ...]],
        dim: int,
    ) -> None:
        """Replace the concatenated weight `stacked` in `targets` by views of its parts along `dim`,
        with the sizes that the files have. Raises `ConfigError` if these do not add up to its
        size."""
        names = [name.replace(_plain(pattern), _plain(other)) for other in converter.source_patterns]
        sizes = [found[part][dim] if part in found else 0 for part in names]
        if sum(sizes) != self._targets[stacked].shape[dim]:
            raise ConfigError(
                f"{stacked!r} has {self._targets[stacked].shape[dim]} rows, "
                f"and {', '.join(names)} have {sizes} in the files",
                remedy="download the model again",
            )
        self._targets |= dict(zip(names, self._targets.pop(stacked).split(sizes, dim), strict=True))

    def _replace(self, stacked: str, name: str, converter: WeightConverter, pattern: str) -> None:
        weight, parts = self._targets.pop(stacked), converter.source_patterns
        own = _expression(pattern).search(name)
        assert own is not None
        for expert, one in enumerate(weight):
            for other, place in zip(parts, one.chunk(len(parts)), strict=True):
                tail = _plain(other).replace("*", str(expert), 1)
                self._targets[name[: own.start()] + tail + name[own.end() :]] = place


def _expression(pattern: str) -> re.Pattern[str]:
    """Compile a converter's pattern, in which a star is an expert's number."""
    return re.compile(re.escape(_plain(pattern)).replace(r"\*", r"\d+"))


def _plain(pattern: str) -> str:
    """Return a converter's pattern with unescaped dots."""
    return pattern.replace(r"\.", ".")
