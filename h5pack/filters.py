"""HDF5's filters that h5pack knows: their registered numbers."""

from __future__ import annotations

GZIP = 1
SHUFFLE = 2
FLETCHER32 = 3
LZF = 32000
BLOSC = 32001
LZ4 = 32004
BITSHUFFLE = 32008
ZSTD = 32015
