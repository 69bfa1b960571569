"""Several tokens of a request in one decode step: what is proposed after its last token, and which
of it is right."""
