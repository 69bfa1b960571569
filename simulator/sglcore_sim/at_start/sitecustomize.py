"""What a process of Python imports before anything else, where `python -m sglcore_sim` put this
folder on its path."""

from __future__ import annotations

import os

import sglcore_sim
from sglcore_sim.__main__ import VARIABLE

sglcore_sim.install(os.environ[VARIABLE])
