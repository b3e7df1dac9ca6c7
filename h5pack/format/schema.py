"""The names and constants of the file format; docs/format.md describes their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

FORMAT_VERSION = 1

# Attributes of the root group.
FORMAT = "h5pack_format"
VERSION = "h5pack_version"
COMPLETE = "h5pack_complete"
OPTIONS = "h5pack_options"

# Datasets and groups.
IMAGES = "images"
ENCODED = "encoded"
ENCODED_DATA = "encoded/data"
ENCODED_OFFSETS = "encoded/offsets"
ENCODED_SIZE = "encoded/size"
LABELS = "labels"
FILENAMES = "filenames"
FIELDS = "fields"
SPLITS = "splits"
SPLIT_NAMES = "splits/name"
SPLIT_ROWS = "splits/rows"
CHECKSUMS = "checksums"
CHUNK_CHECKSUMS = "checksums/chunks"
STATISTICS = "statistics"
REJECTS = "rejects"
RESERVED = frozenset({IMAGES, LABELS, FILENAMES, SPLITS, CHECKSUMS, STATISTICS, REJECTS, ENCODED, FIELDS, "chunks"})
FIELD_DATA = "data"
FIELD_OFFSETS = "offsets"

# Kinds of fields.
ARRAY = "array"
BOXES = "boxes"
KEYPOINTS = "keypoints"
RAGGED = "ragged"
TEXT = "text"
TEXTS = "texts"
MASK = "mask"
IMAGE = "image"
COORDINATE_KINDS = (BOXES, KEYPOINTS)
TEXT_KINDS = (TEXT, TEXTS)
RAGGED_KINDS = (*COORDINATE_KINDS, RAGGED, *TEXT_KINDS)
"""Kinds of fields whose rows differ in length. Such a field is a group of two datasets, `FIELD_DATA` and
`FIELD_OFFSETS`."""
PIXEL_KINDS = (MASK, IMAGE)
MOVED_KINDS = (*PIXEL_KINDS, *COORDINATE_KINDS)
"""Kinds of fields that must be transformed with their image when the image is cropped or resized."""


@dataclass(frozen=True)
class FieldKind:
    """What the fields of one kind have in common."""

    parameter: str  # the parameter of `h5pack.convert` that names columns of this kind
    dtype: str | None = None  # the dtype of `FIELD_DATA`; None: any
    shapes: tuple[tuple[int, ...], ...] = ()  # the possible shapes of an entry of `FIELD_DATA`; (): any


KINDS = {
    ARRAY: FieldKind("field_columns"),
    BOXES: FieldKind("box_columns", "<f4", ((4,),)),
    KEYPOINTS: FieldKind("keypoint_columns", "<f4", ((2,), (3,))),
    RAGGED: FieldKind("field_columns"),
    TEXT: FieldKind("text_columns", "u1", ((),)),
    TEXTS: FieldKind("text_columns", "u1", ((),)),
    MASK: FieldKind("mask_columns"),
    IMAGE: FieldKind("image_columns"),
}

# Attributes of fields.
KIND = "kind"
DTYPE = "dtype"
BOX_FORMAT = "box_format"
XYXY = "xyxy"

# Attributes of datasets.
CLASSES = "classes"
COLUMNS = "columns"
LAYOUT = "h5pack_layout"
RDCC_NBYTES = "h5pack_rdcc_nbytes"
RDCC_NSLOTS = "h5pack_rdcc_nslots"
RDCC_W0 = "h5pack_rdcc_w0"
STORED_BYTES = "stored_bytes"


def field_path(name: str) -> str:
    """Return the path of a field in a pack."""
    return f"{FIELDS}/{name}"


def checksums_path(name: str) -> str:
    """Return the path of the dataset with the row checksums of dataset `name`."""
    return f"{CHECKSUMS}/{name}"


NO_LABEL = -1
"""The label that is stored for an unlabeled image, in a pack in which other images have labels. If there are no class
names, -1 may also be the number of a class, and rows with this label are treated like others."""

# Chunks of at least this many bytes start on a page boundary. So no two such chunks share a page, and each can be
# transferred with O_DIRECT and GPUDirect Storage.
ALIGNMENT_THRESHOLD_BYTES = 65_536
ALIGNMENT_BYTES = 4_096


class FilterId(IntEnum):
    """The registered numbers of the HDF5 filters that h5pack itself can decode, some of them by HDF5's plugins."""

    GZIP = 1
    SHUFFLE = 2
    FLETCHER32 = 3
    LZF = 32000
    BLOSC = 32001
    LZ4 = 32004
    BITSHUFFLE = 32008
    ZSTD = 32015


@dataclass(frozen=True)
class CompressionMethod:
    """A method of the option `compression`. If it has levels, 1 to `max_level`, a level can follow it, e.g. gzip:9."""

    filter: FilterId
    parameters: tuple[int, ...]  # the filter's parameters; if the method has levels, the default level
    max_level: int = 0  # 0 if the method has no levels


COMPRESSION_METHODS = {
    "gzip": CompressionMethod(FilterId.GZIP, (4,), max_level=9),
    "zstd": CompressionMethod(FilterId.ZSTD, (3,), max_level=22),
    # 0 lets the filter choose its block size, 2 compresses each block with LZ4.
    "bitshuffle-lz4": CompressionMethod(FilterId.BITSHUFFLE, (0, 2)),
}

STATISTICS_ROWS = 2_048
"""If rows are pixels, statistics use at least this many rows of a split, or all rows if the split has fewer."""


def statistics_step(split_rows: int, encoded: bool = False) -> int:
    """Return the step between two successive rows of a split from which `/statistics` is computed.

    If rows are pixels, all rows of a split with fewer than 4,096 rows are used, and at least 2,048 rows of a larger
    split. With `encoded`, fewer rows are used, because decoding a row takes far longer than reading its pixels: at most
    128 rows of a split with up to 8,192 rows, and about one row in 64 of a larger split, but at most 1,024 rows.
    """
    if encoded:
        return max(1, -(-split_rows // max(128, min(1024, split_rows // 64))))
    return max(1, split_rows // STATISTICS_ROWS)


def statistics_split(names: tuple[str, ...]) -> int:
    """Return the index of the split that `/statistics` describes: "train", or the first one if there is no "train"."""
    return names.index("train") if "train" in names else 0
