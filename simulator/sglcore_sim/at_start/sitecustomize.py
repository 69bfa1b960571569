"""Install the simulated device at the start of a Python process; `python -m sglcore_sim` puts this
folder on PYTHONPATH, so that Python imports the module first."""

from __future__ import annotations

import os

import sglcore_sim
from sglcore_sim.__main__ import VARIABLE

sglcore_sim.install(os.environ[VARIABLE])
