"""The modules that moved since the contract's number was frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sglcore.device import package

OLDER = Path(package.__file__).with_name(f"api{package.API}")
"""The files with the older names; they go with the next number."""
TARGET = re.compile(r"^from (sglcore\.[\w.]+) import \*", re.MULTILINE)


def moved_modules() -> Mapping[str, str]:
    """Return the module of today by the name that it had."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(OLDER.glob("[!_]*.py"))}
    return {f"sglcore.device.{stem}": target for stem, text in texts.items() for target in TARGET.findall(text)}
