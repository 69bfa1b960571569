"""The vendors' Python modules over the simulated device: their names and signatures, and nothing
that they lack."""
