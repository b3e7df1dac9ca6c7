"""Packs made of other packs: append, join, subset, and virtual files over several packs."""
