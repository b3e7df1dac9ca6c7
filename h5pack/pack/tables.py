"""The tables of a finished pack, made from its plan and from what was written."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from h5pack import schema
from h5pack.pack.journal import RowRecord
from h5pack.pack.placement import Placement
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.skeleton import Tables
from h5pack.pack.statistics import channel_sums, mean_and_std, sampled_rows
from h5pack.rows import RowPlaces, read_all


def make_tables(plan: ConvertPlan, written: RowRecord, final: Placement, places: RowPlaces, descriptor: int) -> Tables:
    """Everything beside the pixels, in the order of the final rows.

    Parameters
    ----------
    plan : ConvertPlan
    written : RowRecord
        Of all planned rows.
    final : Placement
        The planned row that each final row comes from, and the final splits.
    places : RowPlaces
    descriptor : int
        The file, with its rows in their final places.
    """
    catalog = plan.catalog
    origin = plan.placement.order[final.order]
    return Tables(
        labels=None if catalog.labels is None else catalog.labels[origin],
        label_names=catalog.label_names,
        fields={name: values[origin] for name, values in catalog.fields.items()},
        filenames=catalog.names.take(origin.tolist()),
        splits=dict(zip(catalog.split_names, itertools.pairwise(final.starts.tolist()), strict=True)),
        checksums=written.checksums[final.order],
        statistics=_statistics(plan, written, final, places, descriptor),
        rejects=list_rejects(plan, written),
    )


def list_rejects(plan: ConvertPlan, written: RowRecord) -> list[tuple[str, str]]:
    """Name and reason of every image that was not packed, sorted."""
    names, order = plan.catalog.names, plan.placement.order
    rejects = [(reject.name, reject.reason) for reject in plan.rejects]
    return sorted([*rejects, *((names[int(order[row])], reason) for row, reason in written.reasons.items())])


def statistics_range(plan: ConvertPlan, placement: Placement) -> tuple[int, int]:
    """First row, and the row behind the last, of the split that the statistics describe."""
    split = schema.statistics_split(plan.catalog.split_names)
    return int(placement.starts[split]), int(placement.starts[split + 1])


def _statistics(
    plan: ConvertPlan, written: RowRecord, final: Placement, places: RowPlaces, descriptor: int
) -> dict[str, Any]:
    """Channel statistics of the final rows; rows that were not summed when they were written are read back."""
    start, stop = statistics_range(plan, final)
    rows = sampled_rows(start, stop)
    known = dict(zip(written.sampled.tolist(), written.sums, strict=True))
    total = np.zeros((2, plan.options.channels), np.uint64)
    for row in rows.tolist():
        sums = known.get(int(final.order[row]))
        if sums is None:
            data = read_all(descriptor, places.row_bytes, places.offset(row))
            sums = channel_sums(np.frombuffer(data, np.uint8).reshape(plan.row_shape), plan.options.layout)
        total += sums
    mean, std = mean_and_std(total, len(rows), plan.height * plan.width)
    return {
        "mean": mean,
        "std": std,
        "rows": len(rows),
        "step": schema.statistics_step(stop - start),
        "split": plan.catalog.split_names[schema.statistics_split(plan.catalog.split_names)],
    }
