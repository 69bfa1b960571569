"""The architecture rules: each is a function over a source tree, and each is tested with a planted
violation."""
