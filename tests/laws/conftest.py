"""How an engine of the laws runs its steps: eagerly, or with each graph kind that the lane's device
has."""

from __future__ import annotations

import pytest

KINDS = ("full", "breakable", "piecewise", "native")
"""Kinds that capture quickly. A kind that compiles a forward for a minute has its own law."""


@pytest.fixture(
    params=[
        pytest.param("off", marks=pytest.mark.needs("device")),
        *(pytest.param(kind, marks=pytest.mark.needs(f"graphs.{kind}")) for kind in KINDS),
    ]
)
def graph(request: pytest.FixtureRequest) -> str:
    """ "off" or a kind of graph."""
    return request.param
