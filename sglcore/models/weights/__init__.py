"""From the files of a checkpoint to the weights of a model: sources, formats, packing."""
