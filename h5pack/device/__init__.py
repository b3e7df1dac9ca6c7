"""Batches on the device: prefetching, normalization, augmentation and echoing (repeating batches)."""
