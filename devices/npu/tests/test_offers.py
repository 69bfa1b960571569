"""The README's table of what torch_npu offers, held against the stored schemas of its operators."""

from __future__ import annotations

from pathlib import Path

import torch

from sglcore_npu import package
from sglcore_npu.attention_fused import OPERATOR
from sglcore_npu.kernels import OPERATORS
from sglcore_sim.vendors import torch_npu as references
from tests.kernels.library_offers import check_parameters, check_served, check_used, offers_of

OFFERS = offers_of(Path(__file__).parents[1] / "README.md")


def published() -> dict[str, list[str]]:
    """Return the parameters of each operator with a row, by the stored schemas."""
    stored = references.stored_schemas()
    schemas = {name: torch._C.parse_schema(f"npu::{stored[name]}") for name in OFFERS}
    return {name: [argument.name for argument in schema.arguments] for name, schema in schemas.items()}


def test_rows_have_the_operators_parameters_and_name_what_exists() -> None:
    check_parameters(OFFERS, published())
    check_served(OFFERS, package)


def test_the_operators_that_are_used_are_those_that_are_called() -> None:
    check_used(OFFERS, {*OPERATORS, OPERATOR})
