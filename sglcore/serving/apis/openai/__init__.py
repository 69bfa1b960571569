"""OpenAI's Completions, Chat Completions, Embeddings and Models APIs."""
