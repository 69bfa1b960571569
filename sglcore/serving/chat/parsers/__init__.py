"""Incremental parsers of reasoning and tool calls."""
