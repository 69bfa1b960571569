"""What the dialects do alike with a request's fields: refuse by name, gather warnings, call parameters by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.serving.replicas.errors import InvalidRequest

SHOWN = 60
"""Characters of a caller's word that an error repeats."""


def refuse_kind(what: str, kind: str, wanted: str, param: str) -> NoReturn:
    """Raise InvalidRequest about something of a kind that can not stand at `param`."""
    raise InvalidRequest(
        f"{param}: found {what} of type {kind[:SHOWN]!r}, which this server does not take here",
        wanted=wanted,
        remedy="leave it out",
        param=param,
        code="unsupported_value",
    )


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidRequest about the first field that is given and is among `reasons`, which say why it can not be had."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, [], {}):
            raise InvalidRequest(f"{name}: {reason}", remedy="leave it out", param=name, code="unsupported_parameter")


def warnings_of(*groups: Iterable[str]) -> tuple[str, ...]:
    """The names of all groups, each once, sorted."""
    return tuple(sorted({name for group in groups for name in group}))


def checked_params(max_tokens: int | None, values: Mapping[str, Any], own_names: Mapping[str, str]) -> SamplingParams:
    """SamplingParams of the values that are not None; `own_names` maps our names of fields to the dialect's.

    Raises SamplingError, or InvalidRequest about a field that the dialect calls otherwise.
    """
    try:
        return SamplingParams(
            max_tokens=max_tokens, **{name: value for name, value in values.items() if value is not None}
        )
    except SamplingError as error:
        message = str(error)
        ours = next((name for name in own_names if message.startswith(name)), None)
        if ours is None:
            raise
        raise InvalidRequest(own_names[ours] + message.removeprefix(ours), param=own_names[ours]) from None


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """What is raised inside blames a field by the dialect's name for it (`names`: the chat endpoint's to the dialect's)."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise
