"""Tests of the device interface, on device packages that are installed as real distributions in a
temporary folder."""
