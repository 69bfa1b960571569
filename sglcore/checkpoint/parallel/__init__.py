"""How a checkpoint's weights and sizes are divided among ranks."""
