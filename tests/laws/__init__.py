"""Laws of every model through the whole engine: for any schedule, the numbers equal
transformers'."""
