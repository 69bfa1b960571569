"""The `site` fixture of the device tests, for processes."""

from tests.device.conftest import site as site
