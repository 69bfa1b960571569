"""KV pages: free pages, prefix cache, sliding windows, state snapshots, pages of requests."""
