"""Chat: converts messages to a prompt, and a model's text to content, reasoning and tool calls."""
