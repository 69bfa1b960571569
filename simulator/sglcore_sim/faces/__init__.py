"""Faces: the vendors' Python modules over the simulated device, with their names and signatures
only."""
