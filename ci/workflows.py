"""GitHub workflows generated from the lanes: one reusable workflow that runs a lane, and a small one for each device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ci.lanes import ROOT, Lane, lanes

FOLDER = Path(".github") / "workflows"
HEADER = "# Written by `python -m ci workflows --write` from devices/*/ci.toml; a test holds it to them.\n"

REUSABLE = (
    HEADER
    + """name: lane
on:
  workflow_call:
    inputs:
      lane: {required: true, type: string}
      runner: {required: true, type: string}
      image: {required: false, type: string, default: ""}
      torch: {required: false, type: string, default: ""}
      setup: {required: false, type: string, default: ""}
jobs:
  lane:
    runs-on: ${{ fromJSON(inputs.runner) }}
    container: ${{ inputs.image }}
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - name: image
        run: |
          if [ -n "${{ inputs.setup }}" ]; then ${{ inputs.setup }}; fi
          python3 -m venv .venv
          if [ -n "${{ inputs.torch }}" ]; then
            .venv/bin/python tools/install_devices.py --extra test --all --torch "${{ inputs.torch }}"
          fi
      - name: product
        run: .venv/bin/python -m ci run "${{ inputs.lane }}"
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: lane-${{ inputs.lane }}-${{ inputs.torch }}
          path: build/lanes
"""
)


def texts(found: tuple[Lane, ...]) -> Mapping[str, str]:
    """Every workflow file by name."""
    devices = sorted({lane.device for lane in found})
    own = {f"{device}.yml": _device(device, [lane for lane in found if lane.device == device]) for device in devices}
    return {"lane.yml": REUSABLE, **own}


def _device(device: str, found: list[Lane]) -> str:
    head = f"name: {device}\non:\n  push: {{branches: [main]}}\n  pull_request:\n  workflow_dispatch:\njobs:\n"
    return HEADER + head + "".join(_job(lane) for lane in found)


def _job(lane: Lane) -> str:
    runner = "[" + ", ".join(f'"{label}"' for label in lane.runner or ("ubuntu-latest",)) + "]"
    versions = ", ".join(f'"{version}"' for version in lane.torch)
    matrix = ["    strategy:", "      fail-fast: false", f"      matrix: {{torch: [{versions}]}}"]
    lines = [
        f"  {lane.name}:",
        *(matrix if versions else ()),
        "    uses: ./.github/workflows/lane.yml",
        "    with:",
        f"      lane: {lane.name}",
        f"      runner: '{runner}'",
        *(("      torch: ${{ matrix.torch }}",) if versions else ()),
    ]
    lines += [f"      image: {lane.image}"] if lane.image else []
    lines += [f'      setup: "{lane.setup}"'] if lane.setup else []
    if lane.needs_hardware:
        lines.insert(1, f"    if: vars.RUNNERS_{lane.device.upper()} == 'yes'")
    return "\n".join(lines) + "\n"


def generated(root: Path = ROOT) -> dict[str, str]:
    """The stored workflows that this module wrote, by name: those that begin with its header. Others are written by hand."""
    found = {path.name: path.read_text() for path in (root / FOLDER).glob("*.yml")}
    return {name: text for name, text in found.items() if text.startswith(HEADER)}


def differences(root: Path = ROOT) -> list[str]:
    """Generated workflow files that are not what the lanes say."""
    wanted, stored = texts(lanes(root)), generated(root)
    return sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name))


def main(write: bool) -> int:
    """Write the files, or name those that differ; 1 if some do."""
    if write:
        (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
        for name in generated():
            (ROOT / FOLDER / name).unlink()
        for name, text in texts(lanes()).items():
            (ROOT / FOLDER / name).write_text(text)
    different = differences()
    for name in different:
        print(f"{FOLDER / name} differs from the lanes; python -m ci workflows --write")
    return 1 if different else 0
