"""Embeddings, scores, reranking and classification."""
