"""The names and dtypes of the file format; docs/format.md describes what they mean."""

from __future__ import annotations

FORMAT_VERSION = 1

# Attributes of the root group.
FORMAT = "h5pack_format"
VERSION = "h5pack_version"
CREATED = "h5pack_created"
COMPLETE = "h5pack_complete"
OPTIONS = "h5pack_options"

# Datasets and groups.
IMAGES = "images"
LABELS = "labels"
FILENAMES = "filenames"
SPLITS = "splits"
SPLIT_NAMES = "splits/name"
SPLIT_ROWS = "splits/rows"
CHECKSUMS = "checksums"
STATISTICS = "statistics"
REJECTS = "rejects"
RESERVED = frozenset({IMAGES, LABELS, FILENAMES, SPLITS, CHECKSUMS, STATISTICS, REJECTS, "encoded"})

# Attributes of datasets.
CLASSES = "classes"
COLUMNS = "columns"
LAYOUT = "h5pack_layout"
RDCC_NBYTES = "h5pack_rdcc_nbytes"
RDCC_NSLOTS = "h5pack_rdcc_nslots"
RDCC_W0 = "h5pack_rdcc_w0"

NO_LABEL = -1
"""The label of an image that has none, where other images of the pack have one."""

# Chunks of this many bytes or more start on a page boundary, so no two writers share a page
# and whole chunks suit O_DIRECT and GPUDirect Storage.
ALIGNMENT_THRESHOLD_BYTES = 65_536
ALIGNMENT_BYTES = 4_096

STATISTICS_STEP = 8
"""Every how many train rows the channel statistics sample one."""
STATISTICS_SMALL_ROWS = 4_096
"""Packs of up to this many train rows sample them all."""


def statistics_step(train_rows: int) -> int:
    """Every how many train rows `/statistics` samples one: 1 in a small pack, 8 in others."""
    return 1 if train_rows <= STATISTICS_SMALL_ROWS else STATISTICS_STEP


def statistics_split(names: tuple[str, ...]) -> int:
    """Which split `/statistics` describes: the one named train, else the first."""
    return names.index("train") if "train" in names else 0
