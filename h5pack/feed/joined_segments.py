"""Short segments of an order, read as one: beginning with each costs as much as reading some megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from h5pack.feed.order import Segment


def join_segments(segments: Iterable[Segment], most_rows: int, most_batches: int) -> Iterator[Segment]:
    """The same rows in the same places, in fewer segments.

    Parameters
    ----------
    segments : iterable of Segment
        In their order.
    most_rows : int
        That are made of several; a longer one stays as it is.
    most_batches : int
        That one made of several may touch.
    """
    waiting: list[Segment] = []
    rows = 0
    for segment in segments:
        fits = waiting and (
            rows + len(segment.rows) <= most_rows
            # Of several streams the next one may go back to the batches of this one.
            and segment.first >= waiting[-1].last
            and segment.last - waiting[0].first < most_batches
        )
        if waiting and not fits:
            yield _joined(waiting)
            waiting, rows = [], 0
        waiting.append(segment)
        rows += len(segment.rows)
    if waiting:
        yield _joined(waiting)


def _joined(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    spans: list[tuple[int, int, int]] = []
    for segment in segments:
        for batch, slot, count in segment.spans:
            last = spans[-1] if spans else (-1, 0, 0)
            if last[0] == batch and last[1] + last[2] == slot:
                spans[-1] = batch, last[1], last[2] + count
            else:
                spans.append((batch, slot, count))
    begins = np.cumsum([0, *(len(segment.rows) for segment in segments)])
    return Segment(
        np.concatenate([segment.rows for segment in segments]),
        np.concatenate([segment.indices for segment in segments]),
        np.concatenate([segment.places + begin for segment, begin in zip(segments, begins, strict=False)]),
        spans,
    )
