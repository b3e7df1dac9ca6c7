"""Encoded bytes to pixels and back: headers, decoding, resizing, encoding."""
