"""The room of protocols: bodies to requests, what comes of them to events. Each folder is one protocol."""
