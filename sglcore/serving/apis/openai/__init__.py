"""OpenAI's completions, chats, embeddings and models."""
