"""The protocols, one folder each: from request bodies to runs, and from events to answers."""
