"""The interface of models to the worker."""
