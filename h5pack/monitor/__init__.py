"""Measurement of how long the training step waits for data, and of the cause."""
