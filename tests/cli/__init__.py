"""Tests of the command line, each run in a new process."""
