"""Ollama's protocol: its paths below /api, its streams of lines, its errors."""
