"""Laws of every model through the whole engine: whatever the schedule, the numbers are those of
transformers."""
