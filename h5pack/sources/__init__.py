"""Sources of images: folders, archives, CelebA, COCO, manifests, HDF5 files, shards, map-style datasets."""
