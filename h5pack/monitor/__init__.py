"""Measure how long the training step waits for data, and find the cause."""
