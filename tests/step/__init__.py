"""Tests of the host half of a step."""
