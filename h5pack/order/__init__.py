"""The order in which an epoch delivers rows, computed with integers only and without torch."""
