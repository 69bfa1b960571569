"""Chat: converts messages to a prompt, and the model's text to content, reasoning and tool
calls."""
