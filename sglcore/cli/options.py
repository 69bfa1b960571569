"""Command-line options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None, typer.Argument(help="A checkpoint folder or a GGUF file; left out, the embedded model.")
]
