"""The files around the code agree: wheel, sdist, extras and install commands, continuous integration, citation."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import pytest
import yaml

import h5pack
from tests.makers import flat_folder

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").iterdir())]
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [*sorted((ROOT / "h5pack").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


def listed(section: str, option: str) -> list[str]:
    return SETUP[section][option].strip().split("\n")


def packages(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;]", requirement)[0] for requirement in requirements}


EXTRAS = {name: packages(listed("options.extras_require", name)) for name in SETUP["options.extras_require"]}
VERSIONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])


def pins(name: str) -> list[str]:
    """The lines of a file of constraints."""
    return re.findall(r"^\w.*", (ROOT / name).read_text(encoding="utf-8"), re.M)


PINNED = packages(pins("constraints.txt"))


def parsed(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def tracked_files() -> set[str]:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in found.split("\0") if (ROOT / name).is_file()}


def build(what: str, source: Path) -> Path:
    """Build an sdist or a wheel next to its source, without network."""
    code = f"from setuptools import build_meta; build_meta.build_{what}('..')"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    (path,) = source.parent.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of the repository")
    clone = tmp_path_factory.mktemp("sdist") / "clone"
    for name in tracked_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    return build("sdist", clone)


def test_the_sdist_has_all_tracked_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked_files() - names == set()


def test_the_wheel_of_the_sdist_is_complete_and_runs(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tracked_files() if name.startswith("h5pack/")}
    assert "h5pack/py.typed" in names
    # An empty folder instead of an environment: dependencies come from this one.
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True)
    flat_folder(tmp_path / "photos", 3)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def output(*command: str | Path) -> str:
        settings: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
        return subprocess.run([sys.executable, *command], capture_output=True, check=True, **settings).stdout

    assert output("-c", "import h5pack; print(h5pack.__file__)") == f"{site}/h5pack/__init__.py\n"
    assert output(site / "bin" / "h5pack", "--version") == f"h5pack {h5pack.__version__}\n"
    output(site / "bin" / "h5pack", "convert", "photos", "photos.h5")
    with h5py.File(tmp_path / "photos.h5") as file:
        assert len(file["images"]) == 3


def test_install_commands_are_of_extras() -> None:
    """They name ``.[EXTRA]``, in a clone, or a package of an extra, because h5pack is on no package index."""
    extras, names = set(), set()
    for path in (*PROSE, *CODE):
        text = path.read_text(encoding="utf-8")
        targets = re.findall(r"\bpip install '?(\.\[[\w,]+\]|[\w-]+)", text)
        assert len(targets) == text.count("pip install "), path
        extras |= {target[2:-1] for target in targets if target.startswith(".")}
        names |= {target for target in targets if not target.startswith(".")}
    for path in (*PROSE, *SCRIPTS):
        extras |= set(re.findall(r"scripts/install\"? ([a-z,]+)", path.read_text(encoding="utf-8")))
    assert {name for extra in extras for name in extra.split(",")} <= set(EXTRAS)
    assert names - set().union(*EXTRAS.values()) == set()


def test_every_extra_is_documented_with_its_packages() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    rows = {name: set(words.split(", ")) for name, words in re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", text, re.M)}
    assert rows == {name: words for name, words in EXTRAS.items() if name not in ("dev", "docs")}
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert {"`dev`", "`docs`"} <= set(re.findall(r"`\w+`", text))


def test_pre_commit_runs_the_pinned_tools() -> None:
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    tools = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert tools == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert {Path(tool).name for tool in tools} <= PINNED & EXTRAS["dev"]


def test_the_oldest_versions_that_are_claimed_are_tested() -> None:
    oldest = dict(pin.split("==") for pin in pins("constraints-oldest.txt"))
    users = EXTRAS.keys() - {"dev", "docs"}
    requirements = [*listed("options", "install_requires")]
    requirements += [one for extra in users for one in listed("options.extras_require", extra)]
    for requirement in requirements:
        name, bound = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        assert f"{oldest[name]}.".startswith(f"{bound.removesuffix('.0')}."), requirement


def test_all_python_versions_that_are_claimed_are_tested() -> None:
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == VERSIONS
    assert SETUP["options"]["python_requires"] == f">={VERSIONS[0]}"
    assert SETUP["mypy"]["python_version"] == VERSIONS[0]
    commands = [step["run"].split()[0] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = {command for command in commands if "/" in command and not command.startswith(".venv")}
    assert {".ci/run", "scripts/docs"} <= scripts
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_the_citation_is_of_this_version() -> None:
    citation = parsed("CITATION.cff")
    assert (citation["cff-version"], citation["title"].split(":")[0]) == ("1.2.0", "h5pack")
    assert (citation["version"], citation["license"]) == (h5pack.__version__, SETUP["metadata"]["license"])
    assert [author["name"] for author in citation["authors"]] == [SETUP["metadata"]["author"]]
