"""The device interface: what a device package declares, and how devices are found, chosen and
started. Host data only, no tensor library.

Read `package.py` first, and `sglcore/worker/model_worker.py`: together they are the whole contract.
The other files are the core's side of it. Modules that stood here in API 3 can be imported by their
old names until API 4, from the folder `api3`.
"""

from pathlib import Path

__path__.append(str(Path(__file__).with_name("api3")))
