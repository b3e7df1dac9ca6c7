"""HDF5 to uint8 rows."""
