"""PyTorch datasets, samplers and loaders for HDF5 files."""
