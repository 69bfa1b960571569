"""Several processes behind one worker: each has a part of the model."""
