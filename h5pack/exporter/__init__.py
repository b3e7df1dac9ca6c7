"""Export of packs and other HDF5 files to folders of image files."""
