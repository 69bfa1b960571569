"""Tests of the command line, run as processes of their own."""
