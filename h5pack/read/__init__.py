"""Reading of rows from HDF5 files, directly or through the HDF5 library."""
