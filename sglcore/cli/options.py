"""Command-line options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str | None, typer.Argument(help="A checkpoint folder; left out, the embedded model.")]
Device = Annotated[str | None, typer.Option(help="The device to run on; left out, the one that is found.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the processor device.")]
Graph = Annotated[str | None, typer.Option(help='A graph kind of the device, or "off".')]
Attention = Annotated[str | None, typer.Option("--attention-backend", help="An attention backend of the device.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of context; left out, the checkpoint's own.")]
KVMemory = Annotated[str | None, typer.Option("--kv-cache-memory", help="Memory for the KV cache, such as 512M or 4G.")]
Strict = Annotated[bool | None, typer.Option("--strict", help="Refuse to start with anything less than was asked for.")]
