"""How the embedded model was made: its texts, tokenizer, training, drafts, and their acceptance."""
