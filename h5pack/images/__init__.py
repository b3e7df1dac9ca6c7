"""Images and masks: headers, decoding, resizing, encoding, and the options of crops."""
