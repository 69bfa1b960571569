"""The tests of the core. One file per thing tested, named after it."""
