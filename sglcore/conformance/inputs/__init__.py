"""What the laws run on: models, batches, kernel arguments and grammars."""
