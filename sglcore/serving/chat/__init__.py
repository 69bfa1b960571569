"""Chat: from messages to a prompt, and from a model's text to content, reasoning and tool calls."""
