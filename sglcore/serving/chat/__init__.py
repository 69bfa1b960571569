"""The room of chats: messages to a prompt, and a model's text to content, reasoning and calls."""
