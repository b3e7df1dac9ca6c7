"""Conversions on Dask clusters whose scheduler and workers are processes of their own."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import distributed
import h5py
import numpy as np
import pytest
from distributed.comm import CommClosedError
from PIL import Image

import h5pack
from benchmarks.cluster import make_task, write_nothing
from h5pack import cli
from h5pack.cluster import dask_client
from h5pack.cluster.dask_client import Expectations, problems
from h5pack.errors import NoSpaceError, OptionsError, WorkerError
from h5pack.pack.options import ConvertOptions
from h5pack.pack.survey import survey
from h5pack.sources.detect import open_source
from h5pack.sources.reader import FileReader
from h5pack.system.processes import ElasticExecutor, SerialExecutor, using_shared
from tests.cluster.datasets import Deadly, Held, Pictures
from tests.crashing import leftovers, wait_for
from tests.makers import class_folders, flat_folder, pixels, save, tar_file, truncate

ROOT = Path(__file__).parents[2]


class Cluster:
    """A scheduler and a nanny with two workers, all of which are commands."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self._folder = folder
        common = ("--scheduler-file", self.file, "--dashboard-address", "127.0.0.1:0")
        self.scheduler = self._start("scheduler", "--port", "0", "--host", "127.0.0.1", *common)
        wait_for(self.file.exists)
        nanny = self._start("worker", "--nworkers", "2", "--nthreads", "1", *common)
        self._processes = [self.scheduler, nanny]

    def _start(self, kind: str, *arguments: object) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
            "DASK_TEMPORARY_DIRECTORY": str(self._folder),
        }  # fmt: skip
        with (self._folder / f"{kind}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{kind}", *map(str, arguments)],
                env=environment, cwd=self._folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def client(self) -> Any:
        client = distributed.Client(scheduler_file=str(self.file), timeout=60)
        client.wait_for_workers(2, timeout=60)
        # Of reconnecting to a scheduler that a test kills.
        client._timeout = 1
        return client

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    with cluster.client() as client:
        yield client


def folder(root: Path) -> tuple[Any, dict[str, Any]]:
    """A folder with images that turn out to be damaged when they are decoded, so that rows move."""
    source = class_folders(root / "in", {"a": 30, "b": 31}, (96, 64))
    for name in ("a/00003.jpg", "b/00011.jpg"):
        truncate(source / name, 0.8)
    return source, {"chunk_rows": 4}


def kept_files(root: Path) -> tuple[Any, dict[str, Any]]:
    source = class_folders(root / "in", {"a": 20, "b": 21}, (40, 30))
    for number in range(8):
        save(source / "a" / f"{number}.png", number, (33, 22))
    return source, {"keep": "jpeg", "max_side": 36}


def compressed(root: Path) -> tuple[Any, dict[str, Any]]:
    return class_folders(root / "in", {"a": 30, "b": 31}), {"compression": "gzip", "chunk_rows": 4}


def archive(root: Path) -> tuple[Any, dict[str, Any]]:
    return tar_file(root / "in.tar", class_folders(root / "in", {"a": 20, "b": 20})), {"order": "sorted"}


def hdf5(root: Path) -> tuple[Any, dict[str, Any]]:
    with h5py.File(root / "in.h5", "w") as file:
        file["images"] = np.stack([pixels(seed) for seed in range(40)])
    return root / "in.h5", {"chunk_rows": 3}


def masks(root: Path) -> tuple[Any, dict[str, Any]]:
    for number in range(24):
        save(root / "in/images" / f"{number}.jpg", number)
        mask = pixels(number, channels=1) // 64
        (root / "in/masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(root / "in/masks" / f"{number}.png")
    return root / "in", {"source_kind": "pairs", "chunk_rows": 4}


def dataset(root: Path) -> tuple[Any, dict[str, Any]]:
    return Pictures(40), {"chunk_rows": 4}


def test_a_cluster_converts_to_the_same_output_again(tmp_path: Path, client: Any) -> None:
    source, options = kept_files(tmp_path)
    for _ in range(3):
        h5pack.convert(source, tmp_path / "o.h5", client=client, overwrite=True, **options)
    h5pack.convert(source, tmp_path / "local.h5", num_workers=1, **options)
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()


@pytest.mark.parametrize("make", [folder, kept_files, compressed, archive, hdf5, masks, dataset])
def test_the_file_is_the_same_as_that_of_one_process(
    make: Callable[[Path], tuple[Any, dict[str, Any]]], tmp_path: Path, client: Any
) -> None:
    source, options = make(tmp_path)
    (tmp_path / "out").mkdir()
    report = h5pack.convert(source, tmp_path / "out/o.h5", client=client, **options)
    local = h5pack.convert(source, tmp_path / "local.h5", num_workers=1, **options)
    assert (tmp_path / "out/o.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()
    assert (report.num_workers, report.images, report.moved_rows) == (2, local.images, local.moved_rows)
    assert leftovers(tmp_path / "out") <= {"o.h5", "o.h5.rejects.csv"}
    assert not any(client.run(lambda: list(dask_client._prepared)).values())


def test_shards_are_the_same_as_those_of_one_process(tmp_path: Path, client: Any) -> None:
    source, options = folder(tmp_path / "in")
    options |= {"chunk_rows": 4, "shard_bytes": 1_500_000}
    found = []
    for name, kind in (("local", {"num_workers": 1}), ("cluster", {"client": client})):
        (tmp_path / name).mkdir()
        assert h5pack.convert(source, tmp_path / name / "o.h5", **options, **kind).shards > 1
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert found[0] == found[1]


def test_tasks_of_a_killed_worker_are_done_by_others(tmp_path: Path, client: Any) -> None:
    (tmp_path / "deaths").mkdir()
    dataset = Deadly(60, tmp_path / "deaths", times=1)
    h5pack.convert(dataset, tmp_path / "o.h5", client=client, chunk_rows=4)
    assert len(leftovers(tmp_path / "deaths")) == 1
    h5pack.convert(Pictures(60), tmp_path / "local.h5", num_workers=1, chunk_rows=4)
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()


def test_a_canceled_task_does_not_hold_up_the_others(tmp_path: Path, client: Any) -> None:
    with dask_client.open_dask_executor(client, None, None, tmp_path / "o.h5.partial") as executor:
        cancelled = executor.submit(time.sleep, 0.3)
        assert cancelled.cancel()
        # The result of the cancelled task arrives before these.
        assert [executor.submit(time.sleep, 0.4).result(60), executor.submit(abs, -2).result(60)] == [None, 2]


def test_an_image_that_kills_each_worker_ends_the_conversion(tmp_path: Path, client: Any) -> None:
    (tmp_path / "deaths").mkdir()
    with pytest.raises(WorkerError, match=r"sample \d+"):
        h5pack.convert(Deadly(16 * 31, tmp_path / "deaths", times=9), tmp_path / "o.h5", client=client)
    assert len(leftovers(tmp_path / "deaths")) == 2
    assert leftovers(tmp_path) == {"deaths"}


def test_a_killed_scheduler_leaves_what_can_be_resumed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    held = tmp_path / "held"
    raised: list[BaseException] = []

    def convert(client: Any) -> None:
        try:
            h5pack.convert(Held(60, held), tmp_path / "o.h5", client=client, chunk_rows=4)
        except WorkerError as error:
            raised.append(error)

    try:
        with cluster.client() as client:
            thread = threading.Thread(target=convert, args=(client,))
            # Hold the workers when rows are written, not in the survey.
            before = dask_client.DaskExecutor.submit

            def submit(self: Any, fn: Any, /, *arguments: Any) -> Any:
                if fn.__name__ == "write_rows":
                    held.touch()
                return before(self, fn, *arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dask_client.DaskExecutor, "submit", submit)
                thread.start()
                wait_for((tmp_path / "reached").exists)
            os.kill(cluster.scheduler.pid, signal.SIGKILL)
            thread.join()
        held.unlink()
    finally:
        cluster.close()
    assert [error.parameters for error in raised] == [("resume=True",)]  # type: ignore[attr-defined]
    assert not (tmp_path / "o.h5").exists()
    # `Held` is another dataset for the source's name only.
    assert h5pack.convert(Pictures(60), tmp_path / "o.h5", num_workers=1, chunk_rows=4, resume=True).images == 60
    h5pack.convert(Pictures(60), tmp_path / "local.h5", num_workers=1, chunk_rows=4)
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()
    assert not list(tmp_path.glob("o.h5.*"))


def test_workers_with_other_versions_are_refused_before_anything_is_written(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = class_folders(tmp_path / "in", {"a": 4})
    versions = {**dask_client.decoder_versions(), "Pillow": "1.0", "simplejpeg": "0.5"}
    monkeypatch.setattr(dask_client, "decoder_versions", lambda: versions)
    with pytest.raises(WorkerError, match=r"Pillow .* instead of 1\.0.*simplejpeg .* instead of 0\.5"):
        h5pack.convert(source, tmp_path / "o.h5", client=client)
    assert leftovers(tmp_path) == {"in"}


@pytest.mark.parametrize("error", [AssertionError(), TypeError("TLS expects a ssl_context"), ValueError("no\nJSON")])
def test_an_unusable_scheduler_is_one_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask raises these for an incomplete scheduler file, tls:// without settings, and a file that is not JSON."""
    # Not a real client: if the garbage collector finds one that failed while another starts, Dask may deadlock.
    monkeypatch.setattr(distributed, "Client", Mock(side_effect=error))
    refused = pytest.raises(WorkerError, match=r"no Dask scheduler answers \(\w")
    with refused as caught, dask_client.open_client("tcp://127.0.0.1:9"):
        pass
    assert "\n" not in str(caught.value)


def test_a_local_cluster_that_cannot_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "LocalCluster", Mock(side_effect=OSError("too many open files")))
    refused = pytest.raises(
        WorkerError, match=r"^local:2: the cluster cannot be started \(too many open files\); .*ulimit"
    )
    with refused, dask_client.open_client("local:2"):
        pass


def test_a_relative_source_is_that_of_this_process(
    tmp_path: Path, client: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers have another working directory, with other images of the same names."""
    (tmp_path / "link").symlink_to(tmp_path / "other" / "deep")
    (tmp_path / "other" / "deep").mkdir(parents=True)
    for seed, folder in enumerate(("in", "other/there", cluster.file.parent / "in")):
        save(tmp_path / folder / "0.png", seed)
    monkeypatch.chdir(tmp_path)
    for source, seed in (("in", 0), ("link/../there", 1)):
        h5pack.convert(source, "o.h5", client=client, overwrite=True)
        assert np.array_equal(h5pack.H5Dataset("o.h5")[0].image, pixels(seed))


def test_what_a_worker_does_not_see_is_named(tmp_path: Path) -> None:
    source = save(tmp_path / "in.jpg")
    expected = Expectations.here(str(source), tmp_path / "o.h5.partial")
    assert problems(expected) == []
    others = {
        "source": str(tmp_path / "missing"),
        "source_bytes": 5,
        "token": "0123",
        "probe": str(tmp_path / "missing/probe"),
        "versions": {**expected.versions, "libjpeg-turbo": "0.1"},
    }
    for name, value in others.items():
        (found,) = problems(replace(expected, **{name: value}))
        assert (str(tmp_path) in found) == (name != "versions")
    assert len(leftovers(tmp_path)) == 2


@pytest.mark.parametrize("without", ["images", "masks", "further images"])
def test_a_file_that_only_a_worker_does_not_find_is_no_reason_to_reject(tmp_path: Path, without: str) -> None:
    source = flat_folder(tmp_path / "in", 3)
    for number in range(3):
        save(source / "more" / f"{number}.png", number)
        Image.fromarray(np.zeros((20, 14), np.uint8)).save(source / "more" / f"m{number}.png")
    lines = [f"0000{number}.jpg,more/m{number}.png,more/{number}.png" for number in range(3)]
    missing = ["missing.jpg,more/m0.png,more/0.png", "00000.jpg,no.png,more/0.png", "00000.jpg,more/m0.png,no.png"]
    (source / "table.csv").write_text("\n".join(["filename,mask,second", *lines, *missing]))
    options = ConvertOptions(mask_columns=("mask",), image_columns=("second",), max_pixels=10**6)
    catalog = open_source(source / "table.csv", options.source_options, tmp_path)
    elsewhere = shutil.copytree(source, tmp_path / "elsewhere")

    class Elsewhere(SerialExecutor, ElasticExecutor):
        def in_flight(self) -> int:
            return 1

        def submit(self, fn: Any, /, *arguments: Any, **settings: Any) -> Any:
            with using_shared(FileReader(str(elsewhere))):
                return super().submit(fn, *arguments, **settings)

    found = survey(catalog, Elsewhere(), 1, options, lambda count: None)
    assert [reason.rpartition(": ")[2] for reason in found.reasons.values()] == ["file not found"] * 3
    pattern = {"images": "0000?.jpg", "masks": "more/m?.png", "further images": "more/?.png"}[without]
    for path in elsewhere.glob(pattern):
        path.unlink()
    with pytest.raises(WorkerError, match=r"00000\.jpg"):
        survey(catalog, Elsewhere(), 1, options, lambda count: None)


def full(task: object) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_tasks_of_the_benchmark_are_those_of_a_conversion() -> None:
    task = make_task(1, 40)
    assert [image[0] for group in task.groups for image in group.images] == list(range(40, 80))
    assert [len(record.packed) for record in write_nothing(task)] == [32, 8]


def test_a_full_disk_is_an_error_that_names_the_machine(tmp_path: Path) -> None:
    expected = Expectations.here(None, tmp_path / "o.h5.partial")
    dask_client.prepare(expected, pickle.dumps(None))
    with pytest.raises(NoSpaceError, match=socket.gethostname()):
        dask_client.run_pickled(expected.token, pickle.dumps((full, (None,))))
    dask_client.forget(expected.token)
    with pytest.raises(WorkerError):
        dask_client.run_pickled(expected.token, pickle.dumps((full, (None,))))


def test_a_probe_that_does_not_fit_onto_the_disk_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, data: str) -> None:
        path.touch()
        full(None)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError):
        Expectations.here(None, tmp_path / "o.h5.partial")
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize("method", ["run", "register_plugin"])
@pytest.mark.parametrize(("status", "error"), [("running", CommClosedError()), ("closed", RuntimeError())])
def test_a_scheduler_that_is_lost_before_the_first_task_is_one_error(
    tmp_path: Path, method: str, status: str, error: Exception
) -> None:
    client = Mock(status=status, **{"run.return_value": {}, f"{method}.side_effect": error})
    with (
        pytest.raises(WorkerError, match="scheduler"),
        dask_client.open_dask_executor(client, None, None, tmp_path / "o.h5.partial"),
    ):
        pass
    assert leftovers(tmp_path) == set()


def test_a_worker_that_cannot_be_prepared_is_no_lost_scheduler(tmp_path: Path) -> None:
    client = Mock(status="running", **{"run.return_value": {}, "register_plugin.side_effect": MemoryError("no room")})
    with (
        pytest.raises(WorkerError, match="no room") as caught,
        dask_client.open_dask_executor(client, None, None, tmp_path / "o.h5.partial"),
    ):
        pass
    assert caught.value.parameters == ()
    assert leftovers(tmp_path) == set()


def test_a_worker_that_is_lost_while_it_is_checked_is_no_error(tmp_path: Path) -> None:
    client = Mock(status="running", **{"run.return_value": {"tcp://lost": CommClosedError(), "tcp://b": []}})
    with dask_client.open_dask_executor(client, None, None, tmp_path / "o.h5.partial"):
        pass
    assert client.register_plugin.call_count == 1


def test_a_worker_that_joins_later_is_checked(tmp_path: Path) -> None:
    expected = Expectations.here(None, tmp_path / "o.h5.partial")
    dask_client.prepare(replace(expected, versions={**expected.versions, "Pillow": "1.0"}), b"")
    with pytest.raises(WorkerError, match=r"instead of 1\.0"):
        dask_client.run_pickled(expected.token, b"")
    dask_client.forget(expected.token)


def test_misuse_is_refused(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = class_folders(tmp_path / "in", {"a": 4})
    for settings in ({"client": client, "part": "1/2"}, {"client": "tcp://host:8786"}):
        with pytest.raises(OptionsError):
            h5pack.convert(source, tmp_path / "o.h5", **settings)
    monkeypatch.setattr(dask_client, "_CONNECT_SECONDS", 1)
    command = ["convert", str(source), str(tmp_path / "o.h5")]
    for options, code in (
        ("--cluster nonsense", 2), ("--cluster local:x", 2), ("--cluster local:2 --workers 2", 2),
        ("--cluster local:2 --part 1/2", 2), ("--part 3/2", 2), ("--part 1/2 --resume", 2), ("--part x", 2),
        ("--cluster tcp://127.0.0.1:1", 1),
    ):  # fmt: skip
        assert cli.main([*command, *options.split()]) == code, options
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert cli.main([*command, "--cluster", "local:1"]) == 1
    assert leftovers(tmp_path) == {"in"}


def test_the_command_starts_workers_and_prints_nothing_else(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "in", {"a": 20, "b": 20})
    command = [sys.executable, "-m", "h5pack", "convert", str(source), str(tmp_path / "o.h5"), "--cluster", "local:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["time", "done"]
    h5pack.convert(source, tmp_path / "local.h5", num_workers=1)
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "local.h5").read_bytes()
