"""A batch as two halves that take turns: where one waits for other ranks the other computes."""
