"""The conformance kit: its laws hold for the reference, each of its mutants is caught, and its data
is correct."""
