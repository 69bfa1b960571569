"""OpenAI's Files and Batch APIs, stored in a folder of this machine."""
