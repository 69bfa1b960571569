"""docs/map.md names every file of the core, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from sglcore.models.registry import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")


def named_files(text: str) -> set[str]:
    """Every `something.py` in the text, without its folders."""
    return {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", text)}


def core_files() -> set[str]:
    return {file.name for file in (ROOT / "sglcore").rglob("*.py") if not file.name.startswith("__")}


def test_every_file_of_the_core_is_on_the_map() -> None:
    assert core_files() - named_files(MAP) == set()


def test_the_map_names_no_file_that_is_not_there() -> None:
    tools = {file.name for folder in ("tools", "devices", "ci", "simulator") for file in (ROOT / folder).rglob("*.py")}
    assert named_files(MAP) - core_files() - tools == set()


def test_every_architecture_with_a_language_model_is_in_the_table_of_models() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    assert {name for name in ARCHITECTURES if name.endswith(("ForCausalLM", "ForConditionalGeneration"))} <= named


def test_a_reader_finds_where_a_token_is_sampled_and_how_a_device_is_chosen() -> None:
    assert re.search(r"sampling/sampler\.py.*this is where a token is sampled", MAP, re.DOTALL)
    assert re.search(r"Where a device is chosen.*device/selection\.py", MAP)
    from sglcore.device.selection import select
    from sglcore.sampling.sampler import Sampler

    assert select.__doc__ and Sampler.sample.__doc__


def test_one_token_is_followed_through_at_most_twenty_files_in_at_most_six_forms() -> None:
    way = MAP[MAP.index("### One token's way") : MAP.index("**Where a device is chosen:**")]
    rows = [line for line in way.splitlines() if line.startswith("| `")]
    files = {f"sglcore/{name}" for row in rows for name in re.findall(r"^\| `([\w/]+\.py)`", row)}
    assert len(files) == len(rows) <= 20 and all((ROOT / file).is_file() for file in files)
    forms = re.findall(r"\*\*(.+?)\*\*", "\n".join(rows))
    assert 0 < len(forms) <= 6
