"""A disk that fails while a loader reads: the rows are named, and no wrong pixel is delivered."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from h5pack.system.files import drop_cache, file_system_type
from tests.data import packs

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(void) { const char *mark = getenv("DISK_FAILS"); return mark && access(mark, F_OK) == 0; }
#define READ(name) \
    ssize_t name(int fd, const struct iovec *v, int n, off_t at) { \
        ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #name); \
        if (fails()) { errno = EIO; return -1; } \
        return real(fd, v, n, at); \
    }
READ(preadv)
READ(preadv64)
/* Populating a mapping (22) reads the disk only for pages that are not cached. */
static int cached(void *at, size_t n) {
    size_t pages = (n + 4095) / 4096, i;
    unsigned char *flags = malloc(pages);
    int all = mincore(at, n, flags) == 0;
    for (i = 0; i < pages && all; i++) all = flags[i] & 1;
    free(flags);
    return all;
}
int madvise(void *at, size_t n, int advice) {
    int (*real)(void *, size_t, int) = dlsym(RTLD_NEXT, "madvise");
    if (advice == 22 && fails() && !cached(at, n)) { errno = EIO; return -1; }
    return real(at, n, advice);
}
"""

READER = """
import json, os, sys
import h5pack
import h5pack.read.mapping
from h5pack.errors import ReadError

def read(path, checked_for, file_systems, fail_at=5):
    h5pack.read.mapping.CHECK_SECONDS = checked_for
    h5pack.read.mapping._BLOCK_FILE_SYSTEMS = file_systems
    h5pack.read.mapping._SMALL_BYTES = 0
    found = {"batches": 0, "error": None}
    dataset = h5pack.H5Dataset(path)
    try:
        with h5pack.H5Loader(dataset, 8, window=2, num_threads=2, seed=1) as loader:
            for epoch in range(2):
                for images, labels in loader:
                    for image, label in zip(images, labels.tolist()):
                        assert (image == label % 251).all()
                    found["batches"] += 1
                    if found["batches"] == fail_at:
                        open(os.environ["DISK_FAILS"], "w").close()
    except ReadError as error:
        found["error"] = str(error)
    os.unlink(os.environ["DISK_FAILS"])
    return found

print(json.dumps([read(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler: sudo apt-get install gcc")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True)
    return folder / "shim.so"


def test_a_failing_disk_is_an_error_with_the_rows(tmp_path: Path, shim: Path) -> None:
    # More than the kernel and the loader read ahead. With chunks of 3 MiB, most of a block's rows are wanted.
    rows = 480
    values = (np.arange(rows) % 251).astype(np.uint8)
    images = np.broadcast_to(values[:, None, None, None], (rows, 256, 256, 3))
    paths = [tmp_path / name for name in "abc"]
    cached, cold, loaded = (packs.write(path, 16, images=images, labels=np.arange(rows)) for path in paths)
    for path in (cold, loaded):
        drop_cache(path)
    suited = [file_system_type(tmp_path)]
    cases = [(str(cached), 60.0, suited), (str(cached), 0.0, suited), (str(cold), 0.0, []), (str(loaded), 0.0, suited)]
    environment = {**os.environ, "LD_PRELOAD": str(shim), "DISK_FAILS": str(tmp_path / "mark")}
    # One process for all cases, because it imports torch.
    ended = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(cases)],
        check=False, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    # Pages in memory need no disk.
    assert found[:2] == 2 * [{"batches": rows // 4, "error": None}]
    for path, one in zip((cold, loaded), found[2:], strict=True):
        assert 5 <= one["batches"] < rows // 8
        assert str(path) in one["error"]
        assert "'images' row" in one["error"]
