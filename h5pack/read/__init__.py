"""Read rows of HDF5 files, directly or through the HDF5 library."""
