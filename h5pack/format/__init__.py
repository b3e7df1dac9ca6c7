"""The file format: names, values of fields, chunk and cache plans, checksums, byte offsets of rows."""
