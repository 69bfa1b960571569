"""The text that the demo model learns from: a seeded writer of stories, dialogues, sums, JSON and
Python."""

from .corpus import CATEGORIES, Document, document, documents, long_document

__all__ = ["CATEGORIES", "Document", "document", "documents", "long_document"]
