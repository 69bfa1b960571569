"""Runs pip as if on another machine: `python pip_elsewhere.py MARKERS install ...`, with the values
of environment markers as JSON.

pip's own --platform and --python-version choose wheels, but pip evaluates the markers of
requirements for the machine it runs on: without this, a resolution for macOS would need the Linux
libraries of torch.
"""

import json
import sys

from pip._vendor.packaging import markers

told = json.loads(sys.argv.pop(1))
here = markers.default_environment()
markers.default_environment = lambda: {**here, **told}  # type: ignore[assignment]

from pip._internal.cli.main import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
