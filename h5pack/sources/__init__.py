"""Where images come from: folders, CelebA as distributed, manifests, map-style datasets."""
