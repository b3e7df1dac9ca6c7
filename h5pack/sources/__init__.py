"""Sources of images: folders, CelebA as distributed, manifests, HDF5 files, map-style datasets."""
