"""`LAWS`: every law of the kit, sorted by level. `laws_up_to` selects some by level and name."""

from __future__ import annotations

from collections.abc import Collection

from sglcore.conformance.law import LEVELS, Law, up_to
from sglcore.conformance.laws import (
    laws_attention,
    laws_facts,
    laws_graphs,
    laws_hidden,
    laws_kernels,
    laws_masks,
    laws_memory,
    laws_package,
    laws_pool,
    laws_runner,
    laws_serving,
    laws_slices,
    laws_sparse,
    laws_speculative,
)
from sglcore.core.errors import ConfigError

LAWS: tuple[Law, ...] = tuple(
    sorted(
        (
            *laws_package.LAWS,
            *laws_facts.LAWS,
            *laws_runner.LAWS,
            *laws_hidden.LAWS,
            *laws_memory.LAWS,
            *laws_sparse.LAWS,
            *laws_speculative.LAWS,
            *laws_slices.LAWS,
            *laws_graphs.LAWS,
            *laws_masks.LAWS,
            *laws_kernels.LAWS,
            *laws_pool.LAWS,
            *laws_attention.LAWS,
            *laws_serving.LAWS,
        ),
        key=lambda law: LEVELS.index(law.level),
    )
)


def laws_up_to(level: str, names: Collection[str] = ()) -> tuple[Law, ...]:
    """Return the laws of a level (such as "C2") and of the levels before it, sorted by level, or
    only the named ones among them. Raises ConfigError for unknown names; a named law of a higher
    level is left out."""
    unknown = sorted(set(names) - {law.name for law in LAWS})
    if unknown:
        raise ConfigError(
            f"there is no law {', '.join(unknown)}", wanted=f"one of {', '.join(law.name for law in LAWS)}"
        )
    return tuple(law for law in LAWS if law.level in up_to(level) and (not names or law.name in names))
