"""The conformance kit on this package's device. The kit's reference uses torch, so there are no
tests here without torch."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.needs("torch")

if find_spec("torch") is not None:
    from sglcore.conformance.suite import *  # noqa: F403
