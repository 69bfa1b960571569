"""How models write reasoning and calls, read however the text is split."""
