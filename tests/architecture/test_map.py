"""docs/map.md has a row for each folder of the core, and the files on its path of a token exist."""

from __future__ import annotations

import re
from pathlib import Path

from sglcore.models.architecture_registry import ARCHITECTURES
from tools.write_map import table, written

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")


def test_the_table_of_folders_is_that_of_the_tree() -> None:
    assert written(MAP, table()) == MAP, "python -m tools.write_map"


def test_each_folder_says_in_a_sentence_or_two_what_it_is(tmp_path: Path) -> None:
    rows = [row.strip("| ").split(" | ") for row in table().splitlines()[2:]]
    assert len(rows) > 30 and all(len(row) == 3 and 10 < len(row[2]) < 200 for row in rows)
    (tmp_path / "sglcore" / "new").mkdir(parents=True)
    for folder, text in (("", "The core."), ("new", "A new folder.")):
        (tmp_path / "sglcore" / folder / "__init__.py").write_text(f'"""{text}"""')
    (tmp_path / "sglcore" / "new" / "x.py").write_text("")
    assert table(tmp_path).splitlines()[2:] == ["| `sglcore/new/` | 1 | A new folder. |"]


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
