"""Conversion of images into an HDF5 file (a pack)."""
