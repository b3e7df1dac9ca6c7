"""Images: encoded bytes, or pixels of another size, to uint8 pixels."""
