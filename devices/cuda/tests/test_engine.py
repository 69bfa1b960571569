"""The engine laws of half precision on this package's device."""

from sglcore_cuda import package  # noqa: F401
from tests.laws.device_engines import *  # noqa: F403
