"""Vectors and scores of texts: embeddings, pairs, documents in order of relevance, labels."""
