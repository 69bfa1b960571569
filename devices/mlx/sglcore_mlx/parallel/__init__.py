"""Several ranks that hold a model together: tensor parallel layers over mlx.distributed."""
