"""Parsers of reasoning and tool calls, incremental."""
