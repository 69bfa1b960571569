"""Device memory: pools of the KV cache and of recurrent states, page tables, sizes."""
