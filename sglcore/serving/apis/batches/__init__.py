"""OpenAI's files and batches, in a folder of this machine."""
