"""Images to HDF5."""
