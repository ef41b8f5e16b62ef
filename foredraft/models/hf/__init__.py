"""Models that run through transformers."""
