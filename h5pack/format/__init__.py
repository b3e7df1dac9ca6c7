"""The file format: names of datasets and attributes, chunk and cache plans, checksums, byte offsets of rows."""
