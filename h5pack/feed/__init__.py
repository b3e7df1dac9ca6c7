"""Rows to batches; the only wing that imports torch."""
