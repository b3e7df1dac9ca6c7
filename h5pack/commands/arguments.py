"""What several commands take: lists, and which datasets of an HDF5 file mean what."""

from __future__ import annotations

import argparse
from typing import Any


def comma_parts(value: str | None) -> tuple[str, ...]:
    """The parts of a text with commas; none where it is not given."""
    return () if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def add_hdf5(group: Any) -> None:
    """Add the options that say which datasets of an HDF5 file mean what."""
    group.add_argument(
        "--images", metavar="NAME", help="the dataset of images, numbers or encoded ones (default: look)"
    )
    labels = group.add_mutually_exclusive_group()
    labels.add_argument("--labels", metavar="NAME", help="the dataset of labels (default: look)")
    labels.add_argument("--no-labels", action="store_const", const="", dest="labels", help="take no labels")
    group.add_argument("--channel-axis", metavar="WHERE", help="of a row: last, first or none (default: look)")
    group.add_argument("--value-range", metavar="LOW:HIGH", help="values that become 0 and 255 (default of floats 0:1)")


def hdf5_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_hdf5` say, by the names of `h5pack.sources.hdf5_catalog.HDF5Datasets`."""
    from h5pack.pack.options import parse_range

    return {
        "images": arguments.images,
        "labels": arguments.labels,
        "channel_axis": arguments.channel_axis,
        "value_range": None if arguments.value_range is None else parse_range(arguments.value_range),
    }
