"""Installs Chromium for the tests of the web page with apt-get, if run as root.

It never fails: without a browser those tests fail with a message, and all others run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAME = "chromium"
REMEDY = f"the tests of the page need `{NAME}` on the path; install it with your system's package manager"
APT = (("apt-get", "update", "-qq"), ("apt-get", "install", "-y", "-qq", "--no-install-recommends", NAME))


def main() -> int:
    """Install if needed and print what was done; always returns 0. Waits."""
    if shutil.which(NAME):
        return 0
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(REMEDY, file=sys.stderr)
        return 0
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in APT:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"{' '.join(command)} failed: {ran.stderr.strip()[-300:]}\n{REMEDY}", file=sys.stderr)
            return 0
    print(f"{NAME} is installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
