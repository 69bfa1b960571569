"""Other dialects of the chat endpoint: requests become the chat's own, its events become the dialect's."""
