"""What wraps a loader and hands its batches on one by one: length, epochs and state are the loader's."""

from __future__ import annotations

from typing import Any

from h5pack.feed.upstream import Position, Upstream


class LoaderWrapper:
    """The part that `DeviceFeed` and `FeedMonitor` share.

    Parameters
    ----------
    loader : iterable
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._upstream = Upstream(loader)
        # Of the running iteration; None: the state is where the next one begins.
        self._position: Position | None = None

    def __len__(self) -> int:
        """Batches of an epoch, where the loader knows."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Of the running or last iteration: the loader's or its sampler's, else iterations are counted from 0."""
        return self._upstream.epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._upstream.set_epoch(epoch)
        self._position = None

    def state_dict(self) -> dict[str, Any]:
        """Where the running iteration is: behind the last batch that was handed out, whatever was read ahead.

        It is the loader's state, or the state of a DataLoader's sampler, beside the epoch where neither knows it. After
        the loop over an epoch it is the beginning of the next.

        Raises
        ------
        StateError
            If neither keeps one.
        """
        return self._upstream.state_dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where `state` was saved.

        Raises
        ------
        StateError
            If it belongs to another order, or the loader keeps no state.
        """
        self._upstream.load_state_dict(state)
        self._position = None

    def finish(self, position: Position) -> None:
        """An iteration's end was reached."""
        if self._position is position:
            self._upstream.finish()
            self._position = None
