"""Writes the demo model's training text from a seed: stories, dialogues, sums, JSON and Python."""

from .corpus import CATEGORIES, Document, document, documents, long_document

__all__ = ["CATEGORIES", "Document", "document", "documents", "long_document"]
