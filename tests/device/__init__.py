"""Tests of the seam, on device packages that are planted as real distributions in a temporary
folder."""
