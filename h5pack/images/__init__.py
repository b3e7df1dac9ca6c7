"""Encoded bytes to pixels: headers, decoding, resizing."""
