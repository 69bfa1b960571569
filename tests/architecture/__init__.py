"""The rules of the house, each a function over a tree of files, each tested with a planted
violation."""
