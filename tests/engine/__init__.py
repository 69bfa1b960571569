"""The engine from prompt to text, on the embedded model and on random checkpoints."""
