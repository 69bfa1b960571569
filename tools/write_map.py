"""Write the table of folders in docs/map.md from the docstrings of the packages.

python -m tools.write_map
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "map.md"
BEGIN, END = "<!-- folders: python -m tools.write_map -->", "<!-- end -->"


def table(root: Path = ROOT) -> str:
    """A row for each package of the core: its folder, how many files it has, and the first
    paragraph of its docstring."""
    rows = ["| folder | files | what it is |", "|---|---|---|"]
    for file in sorted((root / "sglcore").rglob("__init__.py"))[1:]:
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        files = sum(not each.name.startswith("__") for each in file.parent.glob("*.py"))
        about = " ".join(text.partition("\n\n")[0].split())
        rows.append(f"| `{file.parent.relative_to(root).as_posix()}/` | {files} | {about} |")
    return "\n".join(rows)


def written(page: str, folders: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{folders}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
