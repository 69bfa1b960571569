"""Installs an Arm cross compiler and an Arm emulator for the tests of the native Arm kernels with
apt-get, if run as root.

It never fails: without them those tests fail with a message, and all others run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
"""Programs and the packages that contain them."""
APT = (("apt-get", "update", "-qq"), ("apt-get", "install", "-y", "-qq", "--no-install-recommends"))


def main() -> int:
    """Install if needed and print what was done; always returns 0. Waits."""
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not packages or sys.platform != "linux":
        return 0
    remedy = (
        f"the tests of Arm's kernels need {' and '.join(packages)}; install them with your system's package manager"
    )
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(remedy, file=sys.stderr)
        return 0
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (APT[0], (*APT[1], *packages)):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"{' '.join(command)} failed: {ran.stderr.strip()[-300:]}\n{remedy}", file=sys.stderr)
            return 0
    print(f"{' and '.join(packages)} installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
