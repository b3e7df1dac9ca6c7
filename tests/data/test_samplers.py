"""`ChunkSampler` and `ChunkBatchSampler` under torch's DataLoader: exact epochs, and exact resumes from every batch."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info, random_split

import h5pack
from h5pack.data import selection
from h5pack.errors import OptionsError, StateError
from h5pack.order.row_ranges import RowRange
from h5pack.order.window import OrderPlan
from tests.makers import quick, split_folders

BATCH, CHUNK = 8, 7
KINDS = pytest.mark.parametrize("kind", ["batches", "rows"])
ELASTIC = {"streams": 4, "window": 3, "seed": 9}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 5, "y": 5}, "test": {"x": 31, "y": 26}}, (6, 5))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=CHUNK))
    return folder / "o.h5"


@pytest.fixture(scope="module")
def dataset(pack: Path) -> h5pack.H5Dataset:
    """57 rows, whose first and last chunk are cut by other splits' rows and the file's end."""
    found = h5pack.H5Dataset(pack, split="test", with_rows=True)
    assert found.first_row % CHUNK
    return found


@dataclass
class Fed:
    """A sampler of either kind under a loader of either kind, and how far its consumer is."""

    kind: str
    data: Any
    settings: dict[str, Any]
    workers: int = 0
    batch_size: int = BATCH
    loader_class: Any = DataLoader
    drop_last: bool = False

    def __post_init__(self) -> None:
        more = {"num_workers": self.workers, "collate_fn": rows_of}
        if self.kind == "batches":
            self.sampler: Any = h5pack.ChunkBatchSampler(
                self.data, self.batch_size, drop_last=self.drop_last, **self.settings
            )
            self.loader = self.loader_class(self.data, batch_sampler=self.sampler, **more)
        else:
            self.sampler = h5pack.ChunkSampler(self.data, drop_last=self.drop_last, **self.settings)
            self.loader = self.loader_class(
                self.data, self.batch_size, sampler=self.sampler, drop_last=self.drop_last, **more
            )

    def epoch(self) -> list[list[int]]:
        return list(self.loader)

    def state(self, batches: Sequence[Sequence[int]]) -> dict[str, Any]:
        """As a training loop saves it, which has received these batches."""
        return dict(self.sampler.state_dict(len(batches) if self.kind == "batches" else sum(map(len, batches))))


def rows_of(samples: Any) -> list[int]:
    """Row numbers of the file, the last part of each sample."""
    return [int(sample[-1]) for sample in samples]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# Whole epochs.


@pytest.mark.parametrize(
    ("shuffle", "kind", "workers"),
    [("window", "batches", 2), ("window", "rows", 0), ("full", "rows", 0), ("chunk", "batches", 0), (False, "rows", 2)],
)
def test_every_row_once_an_epoch_with_its_pixels_and_label(
    pack: Path, dataset: h5pack.H5Dataset, kind: str, workers: int, shuffle: str | bool
) -> None:
    with h5py.File(pack) as file:
        images, labels = file["images"][()], file["labels"][()]
    settings = {"shuffle": shuffle, "window": 3}
    if kind == "batches":
        sampler: Any = h5pack.ChunkBatchSampler(dataset, BATCH, **settings)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    else:
        sampler = h5pack.ChunkSampler(dataset, **settings)
        loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, collate_fn=dataset.collate)
    assert len(loader) == 8
    assert len(sampler) == {"batches": 8, "rows": 57}[kind]
    epochs = []
    for _ in range(2):
        found = []
        for pixels, classes, rows in loader:
            assert np.array_equal(pixels.numpy(), images[rows.numpy()])
            assert np.array_equal(classes.numpy(), labels[rows.numpy()])
            found += rows.tolist()
        assert sorted(found) == list(range(dataset.first_row, dataset.first_row + 57))
        epochs.append(found)
    assert (epochs[0] == epochs[1]) == (shuffle is False)


@KINDS
def test_samplers_follow_their_plan(dataset: h5pack.H5Dataset, kind: str) -> None:
    """A sampler yields the order of its `OrderPlan`, which is pinned."""
    fed = Fed(kind, dataset, {"seed": 7, "window": 3})
    plan = OrderPlan(RowRange(dataset.first_row, dataset.first_row + 57, CHUNK), 57, seed=7, window=3)
    for epoch in range(3):
        expected = np.empty(57, np.int64)
        for segment in plan.chunk_groups(epoch):
            low = segment.spans[0][1]
            expected[low + segment.positions] = segment.rows
        assert list(itertools.chain(*fed.epoch())) == expected.tolist()


@pytest.mark.parametrize(("block", "streams"), [(1, 4), (3, 1), (8, 4), (57, 1)])
def test_the_order_of_rows_does_not_depend_on_how_many_are_planned_at_once(
    dataset: h5pack.H5Dataset, monkeypatch: pytest.MonkeyPatch, block: int, streams: int
) -> None:
    whole = list(h5pack.ChunkSampler(dataset, streams=streams, window=3))
    monkeypatch.setattr(selection, "PLANNED_ROWS", block)
    for row in range(len(whole) + 1):
        again = h5pack.ChunkSampler(dataset, streams=streams, window=3)
        again.load_state_dict({**again.state_dict(), "rows": row})
        assert list(again) == whole[row:]


@KINDS
def test_the_last_rows_can_be_left_out(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, {}, drop_last=True)
    assert [len(batch) for batch in fed.epoch()] == [8] * 7
    assert len(fed.loader) == 7
    ranks = [Fed(kind, dataset, {"rank": rank, "num_replicas": 5}, batch_size=2, drop_last=True) for rank in range(5)]
    found = [list(itertools.chain(*fed.epoch())) for fed in ranks]
    assert [len(rows) for rows in found] == [10] * 5
    assert len(set(itertools.chain(*found))) == 50


@pytest.mark.parametrize("make", [h5pack.ChunkSampler, lambda *a, **k: h5pack.ChunkBatchSampler(*a, 5, **k)])
def test_shuffle_true_is_window_and_errors_name_parameters(dataset: h5pack.H5Dataset, make: Any) -> None:
    assert list(make(dataset, shuffle=True)) == list(make(dataset, shuffle="window"))
    wrong: list[dict[str, Any]] = [
        *({"shuffle": "rows"}, {"rank": 2, "num_replicas": 2}, {"streams": 0}),
        {"streams": 3, "rank": 0, "num_replicas": 2},
    ]
    for settings in wrong:
        with pytest.raises(OptionsError) as caught:
            make(dataset, **settings)
        assert next(iter(settings)) in caught.value.parameters


# Ranks.


@pytest.mark.parametrize("shuffle", ["window", "full", "chunk", False])
def test_both_samplers_give_the_same_steps_for_every_number_of_ranks(
    dataset: h5pack.H5Dataset, shuffle: str | bool
) -> None:
    steps = []
    for kind, num_replicas in itertools.product(("batches", "rows"), (1, 2, 4)):
        fed = [
            Fed(
                kind,
                dataset,
                {**ELASTIC, "shuffle": shuffle, "rank": rank, "num_replicas": num_replicas},
                0,
                8 // num_replicas,
            )
            for rank in range(num_replicas)
        ]
        for _ in range(2):
            epoch = zip(*[one.epoch() for one in fed], strict=True)
        steps.append([sorted(itertools.chain(*step)) for step in epoch])
    assert all(found == steps[0] for found in steps)
    assert [len(step) for step in steps[0]] == [8] * 7 + [4]
    assert len(set(itertools.chain(*steps[0]))) == 57


@KINDS
@pytest.mark.parametrize("num_replicas", [2, 3, 7])
def test_ranks_share_the_rows_as_distributed_sampler_does(
    dataset: h5pack.H5Dataset, kind: str, num_replicas: int
) -> None:
    theirs = torch.utils.data.DistributedSampler(dataset, num_replicas, 0)
    found = []
    for rank in range(num_replicas):
        rows = list(itertools.chain(*Fed(kind, dataset, {"rank": rank, "num_replicas": num_replicas}).epoch()))
        assert len(rows) == len(theirs)
        found += rows
    counts = Counter(found)
    assert len(counts) == 57
    assert set(counts.values()) <= {1, 2}


class Watched(Dataset[tuple[int, int]]):
    """Which worker was asked for which row."""

    def __init__(self, dataset: h5pack.H5Dataset) -> None:
        self.first_row, self.count = dataset.first_row, len(dataset)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return self.first_row + index, -1 if info is None else info.id


@pytest.mark.parametrize("lanes", [1, 4])
def test_with_lanes_a_chunk_is_read_by_one_worker(dataset: h5pack.H5Dataset, lanes: int) -> None:
    sampler = h5pack.ChunkBatchSampler(dataset, 4, shuffle="window", window=2, lanes=lanes)
    loader = DataLoader(Watched(dataset), batch_sampler=sampler, num_workers=2)
    workers = defaultdict(set)
    for rows, readers in loader:
        for row, reader in zip(rows.tolist(), readers.tolist(), strict=True):
            workers[row // CHUNK].add(reader)
    assert set(itertools.chain(*workers.values())) == {0, 1}
    shared = sum(len(readers) > 1 for readers in workers.values())
    # A stream's end may cut a chunk, and padding repeats one.
    assert shared <= lanes if lanes > 1 else shared > len(workers) // 2


# Epochs.


@KINDS
def test_each_iteration_is_the_next_epoch_unless_another_is_named(dataset: h5pack.H5Dataset, kind: str) -> None:
    epochs = []
    for number in range(7):
        fed = Fed(kind, dataset, {"seed": 3})
        fed.sampler.set_epoch(number)
        epochs.append(fed.epoch())
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    fed = Fed(kind, dataset, {"seed": 3})
    assert fed.sampler.epoch == 0
    for number in range(3):
        assert fed.epoch() == epochs[number]
        assert fed.sampler.epoch == number
    fed.sampler.set_epoch(5)
    assert fed.epoch() == epochs[5]
    assert fed.epoch() == epochs[6]
    for _ in range(2):
        fed.sampler.set_epoch(1)
        assert fed.epoch() == epochs[1]
    # An epoch that was broken off is over.
    assert next(iter(fed.loader)) == epochs[2][0]
    assert fed.epoch() == epochs[3]
    # An iteration that was made and not begun is none.
    iter(fed.sampler)
    assert fed.epoch() == epochs[4]


def test_persistent_workers_go_through_the_epochs(dataset: h5pack.H5Dataset) -> None:
    expected = Fed("batches", dataset, {})
    fed = Fed("batches", dataset, {}, 2, loader_class=partial(DataLoader, persistent_workers=True))
    for epoch in range(4):
        if epoch == 2:
            for one in (fed, expected):
                one.sampler.set_epoch(11)
        assert fed.epoch() == expected.epoch()


@KINDS
def test_two_iterations_at_once_do_not_disturb_each_other(dataset: h5pack.H5Dataset, kind: str) -> None:
    reference = Fed(kind, dataset, {})
    sampler = Fed(kind, dataset, {}).sampler
    first, second = list(reference.sampler), list(reference.sampler)
    both = list(zip(iter(sampler), iter(sampler), strict=True))
    assert both == list(zip(first, second, strict=True))


# States.


def collected(fed: Fed, epochs: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """All batches of some epochs, and the state in front of each of them."""
    batches, states = [], []
    for _ in range(epochs):
        epoch: list[list[int]] = []
        for batch in fed.loader:
            states.append(fed.state(epoch))
            epoch.append(batch)
        batches += epoch
        states.append(fed.state(epoch))
    return batches, states


@pytest.mark.parametrize(
    ("kind", "workers", "drop_last"),
    [("batches", 0, False), ("rows", 0, True), ("batches", 2, True), ("rows", 2, False)],
)
def test_a_state_saved_at_any_batch_resumes_exactly(
    dataset: h5pack.H5Dataset, kind: str, workers: int, drop_last: bool
) -> None:
    def make() -> Fed:
        return Fed(kind, dataset, {"window": 3}, workers, drop_last=drop_last)

    batches, states = collected(make(), 2)
    assert len(states) == len(batches) + 2
    length = len(batches) // 2
    third = make()
    third.sampler.set_epoch(2)
    batches += third.epoch()
    # Workers are started for some of the states only.
    for number in range(0, len(states), 5 if workers else 1):
        epoch, place = divmod(number, length + 1)
        fed = make()
        fed.sampler.load_state_dict(through_json(states[number]))
        low = epoch * length + place
        assert fed.epoch() == batches[low : (epoch + 1) * length]
        assert fed.sampler.epoch == epoch
        assert fed.epoch() == batches[(epoch + 1) * length : (epoch + 2) * length]


@KINDS
def test_workers_run_ahead_of_what_the_state_counts(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, {}, 2)
    iterator = iter(fed.loader)
    received = [next(iterator), next(iterator)]
    unit = {"batches": 1, "rows": BATCH}[kind]
    assert fed.state(received)[kind] == 2 * unit
    assert fed.sampler.state_dict()[kind] > 2 * unit, "yielded to the workers"
    again = Fed(kind, dataset, {})
    again.sampler.load_state_dict(fed.state(received))
    assert again.epoch() == list(iterator)


@KINDS
def test_states_of_states(dataset: h5pack.H5Dataset, kind: str) -> None:
    """Interrupted again and again, after one batch each time."""
    expected = Fed(kind, dataset, {})
    batches = expected.epoch() + expected.epoch()
    found: list[list[int]] = []
    state = Fed(kind, dataset, {}).state([])
    for _ in range(len(batches) + 1):
        fed = Fed(kind, dataset, {})
        fed.sampler.load_state_dict(through_json(state))
        received = list(itertools.islice(fed.loader, 1))
        if not received:
            # At an epoch's end there is nothing left of it, and the next iteration is the next epoch.
            received = list(itertools.islice(fed.loader, 1))
        found += received
        state = fed.state(received)
    assert found[:-1] == batches


@KINDS
def test_where_a_state_points_to(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, {})

    def place(count: int | None = None) -> tuple[int, int]:
        state = fed.sampler.state_dict(count)
        return state["epoch"], state[kind]

    assert place() == place(0) == (0, 0)
    whole = len(list(fed.sampler))
    assert place() == (0, whole), "behind the last: that epoch has nothing left"
    assert place(3) == (0, 3)
    iterator = iter(fed.sampler)
    assert place() == place(0) == (1, 0), "made, not begun"
    next(iterator)
    assert place() == (1, 1)
    fed.sampler.set_epoch(5)
    assert place() == (5, 0)
    fed.sampler.load_state_dict({**fed.sampler.state_dict(), "epoch": 4, kind: 2})
    assert place() == (4, 2)
    next(iter(fed.sampler))
    assert place() == (4, 3)
    assert place(2) == (4, 4), "counted from where this iteration began"


@KINDS
def test_naming_the_epoch_keeps_the_place_that_was_loaded_and_naming_another_does_not(
    dataset: h5pack.H5Dataset, kind: str
) -> None:
    expected = Fed(kind, dataset, {})
    epochs = [expected.epoch() for _ in range(4)]
    state = {**expected.sampler.state_dict(), "epoch": 2, kind: 2 * {"batches": 1, "rows": BATCH}[kind]}
    fed = Fed(kind, dataset, {})
    fed.sampler.load_state_dict(state)
    for epoch in range(2, 4):
        fed.sampler.set_epoch(epoch)
        assert fed.epoch() == (epochs[2][2:] if epoch == 2 else epochs[3])
    fed.sampler.load_state_dict(state)
    fed.sampler.set_epoch(3)
    assert fed.epoch() == epochs[3]
    fed.sampler.load_state_dict(state)
    fed.sampler.set_epoch(3)
    fed.sampler.set_epoch(2)
    assert fed.epoch() == epochs[2], "the place was given up"


def test_states_are_pinned(dataset: h5pack.H5Dataset) -> None:
    """A state that this release saved must load in every later one."""
    batches = h5pack.ChunkBatchSampler(dataset, 8, seed=3, window=5)
    rows = h5pack.ChunkSampler(dataset, rank=1, num_replicas=2, streams=4)
    assert batches.state_dict() == {
        "order": {
            "order": 1,
            "start": 10,
            "rows": 57,
            "chunk_rows": 7,
            "shuffle": "window",
            "seed": 3,
            "window": 5,
            "trim": False,
            "drop_last": False,
            "streams": 1,
            "lanes": 1,
            "global_batch": 8,
        },
        "epoch": 0,
        "batches": 0,
    }
    assert rows.state_dict() == {
        "order": {**batches.state_dict()["order"], "seed": 0, "window": 16, "streams": 4, "global_batch": None},
        "epoch": 0,
        "rows": 0,
        "world_size": 2,
    }


@pytest.mark.parametrize(
    ("change", "parameters"),
    [
        *(({"seed": 1}, {"seed"}), ({"window": 2}, {"window"}), ({"shuffle": "full"}, {"shuffle"})),
        *(({"shuffle": False}, {"shuffle"}), ({"drop_last": True}, {"drop_last"}), ({"split": "train"}, {"start"})),
        # A subset has other keys in its identity than a range.
        ({"indices": range(57)}, {"start", "rows_digest"}),
        ({"rank": 0, "num_replicas": 2, "batch_size": 4}, {"streams"}),
    ],
    ids=str,
)
@KINDS
def test_states_of_other_orders_are_refused(
    pack: Path, dataset: h5pack.H5Dataset, kind: str, change: dict[str, Any], parameters: set[str]
) -> None:
    state = through_json(Fed(kind, dataset, {}).sampler.state_dict())
    other = {"batch_size": BATCH, "drop_last": False, **change}
    data = h5pack.H5Dataset(pack, split=other.pop("split"), with_rows=True) if "split" in other else dataset
    batch_size, drop_last = other.pop("batch_size"), other.pop("drop_last")
    refusing = Fed(kind, data, other, batch_size=batch_size, drop_last=drop_last)
    before = refusing.sampler.state_dict()
    with pytest.raises(StateError) as caught:
        refusing.sampler.load_state_dict(state)
    assert refusing.sampler.state_dict() == before
    assert set(caught.value.parameters) <= parameters
    assert caught.value.parameters


@pytest.mark.parametrize(
    ("state_of", "settings", "parameter"),
    [
        ({"batch_size": 8}, {"batch_size": 4}, "global_batch"),
        ({}, {"lanes": 2}, "lanes"),
        ({"indices": [5, 2, 9]}, {"indices": [5, 2, 8]}, "rows_digest"),
    ],
    ids=str,
)
def test_states_of_other_batches_are_refused(
    dataset: h5pack.H5Dataset, state_of: dict[str, Any], settings: dict[str, Any], parameter: str
) -> None:
    def make(**changed: Any) -> h5pack.ChunkBatchSampler:
        return h5pack.ChunkBatchSampler(dataset, **{"batch_size": 8, "streams": 2, **changed})

    state = make(**state_of).state_dict()
    make(**state_of).load_state_dict(state)
    with pytest.raises(StateError) as caught:
        make(**settings).load_state_dict(state)
    assert caught.value.parameters == (parameter,)
    # States of orders that a later release may bring.
    for later in ({"order": 2}, {"weights": "w"}):
        with pytest.raises(StateError) as caught:
            make(**state_of).load_state_dict({**state, "order": {**state["order"], **later}})
        assert caught.value.parameters == tuple(later)


@KINDS
def test_what_is_not_a_state_is_refused(dataset: h5pack.H5Dataset, kind: str) -> None:
    other = Fed({"batches": "rows", "rows": "batches"}[kind], dataset, {}).sampler.state_dict()
    malformed = {"order": 3, "epoch": 0, "batches": 0, "rows": 0, "world_size": 1}
    for wrong in ({}, None, 3, malformed, {"epoch": 0, "batches": 1}, other):
        with pytest.raises(StateError):
            Fed(kind, dataset, {}).sampler.load_state_dict(wrong)


# Other numbers of ranks.


def elastic(kind: str, dataset: h5pack.H5Dataset, num_replicas: int, **more: Any) -> list[Fed]:
    return [
        Fed(kind, dataset, {**ELASTIC, **more, "rank": rank, "num_replicas": num_replicas}, 0, BATCH // num_replicas)
        for rank in range(num_replicas)
    ]


def step_sets(fed: list[Fed]) -> list[list[int]]:
    return [sorted(itertools.chain(*step)) for step in zip(*[one.epoch() for one in fed], strict=True)]


@KINDS
@pytest.mark.parametrize("before", [1, 2, 4])
def test_saved_by_some_ranks_and_resumed_by_others(dataset: h5pack.H5Dataset, kind: str, before: int) -> None:
    whole = elastic(kind, dataset, before)
    steps = step_sets(whole), step_sets(whole)
    fed = elastic(kind, dataset, before)
    iterators = [iter(one.loader) for one in fed]
    received: list[list[list[int]]] = [[] for _ in fed]
    for step in range(len(steps[0]) + 1):
        states = [through_json(one.state(batches)) for one, batches in zip(fed, received, strict=True)]
        assert all(state == states[0] for state in states), "any rank's state is that of all"
        resumed = elastic(kind, dataset, [1, 2, 4][step % 3])
        for one in resumed:
            one.sampler.load_state_dict(states[0])
        assert step_sets(resumed) == steps[0][step:]
        assert step_sets(resumed) == steps[1]
        for batches, iterator in zip(received, iterators, strict=True):
            batches += itertools.islice(iterator, 1)


def test_state_between_multiples_of_the_streams_resumes_on_the_same_ranks_only(dataset: h5pack.H5Dataset) -> None:
    def make(num_replicas: int) -> h5pack.ChunkSampler:
        return h5pack.ChunkSampler(dataset, streams=4, rank=1, num_replicas=num_replicas)

    sampler = make(2)
    whole = list(sampler)
    state = sampler.state_dict(7)
    same = make(2)
    same.load_state_dict(state)
    assert list(same) == whole[7:]
    with pytest.raises(StateError, match="multiple of 2 rows"):
        make(4).load_state_dict(state)
    other = make(4)
    other.load_state_dict(sampler.state_dict(6))
    assert other.state_dict()["rows"] == 3


# torchdata's StatefulDataLoader.

STATEFUL = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@STATEFUL
@pytest.mark.parametrize(
    ("kind", "workers", "size"), [("batches", 0, BATCH), ("rows", 0, 19), ("batches", 2, 19), ("rows", 2, BATCH)]
)
def test_stateful_dataloader_resumes_exactly_from_every_step(
    dataset: h5pack.H5Dataset, stateful: Any, kind: str, workers: int, size: int
) -> None:
    def make(workers: int = workers, loader_class: Any = stateful) -> Fed:
        return Fed(kind, dataset, {"window": 3}, workers, size, loader_class)

    reference = make(0, DataLoader)
    expected = [batch for _ in range(4) for batch in reference.epoch()]
    length = len(expected) // 4
    fed = make()
    # States, and which batches the next epoch must have.
    places = [(pickle.dumps(fed.loader.state_dict()), 0, length)]
    for low in (0, length):
        iterator = iter(fed.loader)
        places.append((pickle.dumps(fed.loader.state_dict()), low, low + length))
        for number in range(low, low + length):
            assert next(iterator) == expected[number]
            places.append((pickle.dumps(fed.loader.state_dict()), number + 1, low + length))
        assert next(iterator, None) is None
        # That iteration is over, and the next one is a whole epoch.
        places.append((pickle.dumps(fed.loader.state_dict()), low + length, low + 2 * length))
    # Workers are started for some of the states only, among them those at the end of the last epoch.
    for state, low, high in places[:: -3 if workers else -1] + places[-2:-1]:
        fed = make()
        fed.loader.load_state_dict(pickle.loads(state))
        assert fed.epoch() == expected[low:high]
        assert fed.epoch() == expected[high : high + length]


@STATEFUL
@KINDS
def test_stateful_dataloader_after_an_epoch_that_was_broken_off(
    dataset: h5pack.H5Dataset, stateful: Any, kind: str
) -> None:
    reference = Fed(kind, dataset, {})
    epochs = [reference.epoch() for _ in range(2)]
    fed = Fed(kind, dataset, {}, loader_class=stateful)
    next(iter(fed.loader))
    iter(fed.loader)
    again = Fed(kind, dataset, {}, loader_class=stateful)
    again.loader.load_state_dict(fed.loader.state_dict())
    assert again.epoch() == epochs[1]


@STATEFUL
@pytest.mark.parametrize(("kind", "workers"), [("batches", 2), ("rows", 0)])
def test_stateful_dataloader_that_keeps_a_state_every_third_step(
    dataset: h5pack.H5Dataset, stateful: Any, kind: str, workers: int
) -> None:
    rarely = partial(stateful, snapshot_every_n_steps=3)
    fed = Fed(kind, dataset, {}, workers, loader_class=rarely)
    iterator = iter(fed.loader)
    states = []
    for _ in range(5):
        next(iterator)
        states.append(pickle.dumps(fed.loader.state_dict()))
    expected = Fed(kind, dataset, {}).epoch()
    for number in (0, 2, 4):
        fed = Fed(kind, dataset, {}, workers, loader_class=rarely)
        fed.loader.load_state_dict(pickle.loads(states[number]))
        assert fed.epoch() == expected[number + 1 :]


@STATEFUL
@KINDS
def test_stateful_dataloader_refuses_states_of_other_orders(
    dataset: h5pack.H5Dataset, stateful: Any, kind: str
) -> None:
    state = Fed(kind, dataset, {"seed": 1}, loader_class=stateful).loader.state_dict()
    fed = Fed(kind, dataset, {"seed": 2}, loader_class=stateful)
    fed.loader.load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        iter(fed.loader)


# Subsets.


@KINDS
def test_subsets_and_indices(dataset: h5pack.H5Dataset, kind: str) -> None:
    parts = random_split(dataset, [40, 17], torch.Generator().manual_seed(0))
    found = []
    for part in parts:
        fed = Fed(kind, part, {"window": 2})
        epochs = [list(itertools.chain(*fed.epoch())) for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(dataset.first_row + index for index in part.indices)
        assert epochs[0] != epochs[1]
        # A chunk's rows come together: within a window of two chunks.
        chunks = [row // CHUNK for row in epochs[0]]
        spread = {chunk: len(chunks) - chunks[::-1].index(chunk) - chunks.index(chunk) for chunk in chunks}
        assert max(spread.values()) <= 2 * CHUNK
        found += epochs[0]
    assert sorted(found) == list(range(dataset.first_row, dataset.first_row + 57))
    nested = Subset(Subset(dataset, range(50)), [49, 3, 3, 20, 41])
    chosen = Fed(kind, nested, {"indices": [4, 0, 1, 2]}, batch_size=3)
    first = dataset.first_row
    assert sorted(itertools.chain(*chosen.epoch())) == [first + 3, first + 3, first + 41, first + 49]


@KINDS
def test_no_rows_at_all(dataset: h5pack.H5Dataset, kind: str) -> None:
    fed = Fed(kind, dataset, {"indices": []})
    assert len(fed.sampler) == 0
    assert fed.epoch() == []
    assert fed.epoch() == []
    assert fed.sampler.epoch == 1


# A billion rows.

FIRST_BATCHES = """
import itertools, json, sys, time
import h5py, numpy, torch.utils.data
import h5pack.data.samplers
from h5pack import ChunkBatchSampler, ChunkSampler, H5Dataset


def peak():
    # Not ru_maxrss, which starts at the memory of the parent process.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


before, slowest, peaks = peak(), 0.0, []
for path in sys.argv[1:]:
    for shuffle, streams in itertools.product(("window", "full", "chunk", False), (1, 8)):
        begin = time.process_time()
        dataset = H5Dataset(path)
        rows = iter(ChunkSampler(dataset, shuffle=shuffle, streams=streams))
        batches = [
            next(iter(ChunkBatchSampler(dataset, 256, shuffle=shuffle, streams=streams))),
            list(itertools.islice(rows, 256)),
        ]
        slowest = max(slowest, time.process_time() - begin)
        for batch in batches:
            assert len(dataset) == 10**9 and len(set(batch)) == 256 and max(batch) < 10**9
            assert dataset.collate(dataset.__getitems__(batch)).shape == (256, 16)
        del dataset
    peaks.append(peak() - before)
print(json.dumps({"seconds": slowest, "peaks": peaks}))
"""


def test_the_first_batch_of_a_billion_rows_takes_little_time_and_memory(tmp_path: Path) -> None:
    paths = []
    for name, chunks in (("contiguous", None), ("chunked", (512, 16))):
        paths.append(str(tmp_path / name))
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("images", (10**9, 16), "u1", chunks=chunks)
    done = subprocess.run([sys.executable, "-c", FIRST_BATCHES, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seconds"] < 5, "CPU seconds, below 1 if nothing is computed for each row of the file"
    contiguous, chunked = found["peaks"]
    assert contiguous < 100_000_000
    # The index of two million chunks: 135 MB measured, 70 bytes a chunk. A number for each row would take 8 GB.
    assert chunked < 200_000_000
