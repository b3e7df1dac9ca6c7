"""The file format: names and constants, field values, chunk and cache plans, checksums, byte offsets of rows."""
