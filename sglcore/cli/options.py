"""Annotated parameters for options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from sglcore.config.engine_config import EngineConfig
from sglcore.config.settings import settings_of

ModelArgument = Annotated[str | None, typer.Argument(help=settings_of(EngineConfig)["model"].help)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every start-up decision and its reason.")]
