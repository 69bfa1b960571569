"""Programs that made the embedded model: texts, tokenizer, training, draft heads, acceptance."""
