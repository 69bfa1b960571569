"""GLM-4 and its successors."""
