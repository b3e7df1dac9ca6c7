"""The rules of the house: which wing may import which, what is public, what is heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import h5pack

PACKAGE = Path(h5pack.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# From the ground up; a module imports only from its own floor's earlier files or from floors below.
GROUND = ["version", "errors", "schema", "filters", "machine", "checksum", "layout", "rows", "hdf5", "wording"]
WINGS = ["decode", "read", "sources", "pack", "feed", "measure", "tools", "bench", "doctor", "commands", "cli"]
MAY_IMPORT = {
    "decode": {"decode"},
    "read": {"decode", "read"},
    "sources": {"read", "sources"},
    "pack": {"decode", "sources", "pack"},
    "feed": {"read", "feed"},
    "measure": {"read", "feed", "measure"},
    "bench": {"decode", "sources", "pack", "read", "feed", "measure", "tools", "bench"},
    "doctor": {"decode", "sources", "pack", "read", "feed", "measure", "tools", "doctor"},
    "tools": {"decode", "sources", "pack", "read", "feed", "tools"},
    "commands": {"pack", "bench", "doctor", "tools", "commands"},
    "cli": {"commands"},
}
# Besides those in feed/: what runs a DataLoader or a training step.
TORCH_ALLOWED = {"bench/worker_way.py", "doctor/device_stages.py", "doctor/feeding.py", "doctor/training_step.py"}
H5PY_ALLOWED = {
    "bench/library_file.py",
    "bench/sample.py",
    "hdf5.py",
    "pack/finished.py",
    "pack/skeleton.py",
    "pack/finisher.py",
    "read/chunk_index.py",
    "read/encoded.py",
    "read/pack.py",
    "read/reader.py",
    "read/virtual.py",
    "sources/hdf5_catalog.py",
    "sources/hdf5_tables.py",
    "tools/info.py",
    "tools/verify.py",
}


def imports_of(module: Path) -> set[str]:
    """Names of the modules that a file imports, at its top or inside its functions."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module != "h5pack":
                found.add(node.module or "")
            if node.module and node.module.startswith("h5pack"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def place(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] not in ("__init__.py", "__main__.py")], ids=str)
def test_imports_only_go_down(module: Path) -> None:
    here = place(module)
    for name in imports_of(module):
        if not name.startswith("h5pack."):
            assert name != "h5pack", f"{module}: imports the package's face"
            continue
        target = name.split(".")[1]
        if target in GROUND:
            if here in GROUND:
                assert GROUND.index(target) < GROUND.index(here), f"{module}: {name} is above"
        else:
            assert here in MAY_IMPORT, f"{module}: the ground imports {name}"
            assert target in MAY_IMPORT[here], f"{module}: {here} may not import {name}"


def test_no_circles() -> None:
    graph = {}
    names = {".".join(("h5pack", *m.with_suffix("").parts)): m for m in MODULES if m.name != "__init__.py"}
    for name, module in names.items():
        graph[name] = {other for other in imports_of(module) if other in names}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        if name != "h5pack.__main__":
            visit(name, ())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_torch_lives_in_feed_and_h5py_where_files_are_opened(module: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(module)}
    assert "torch" not in roots or place(module) == "feed" or str(module) in TORCH_ALLOWED
    assert "h5py" not in roots or str(module) in H5PY_ALLOWED


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_one_noun_a_file(module: Path) -> None:
    source = (PACKAGE / module).read_text()
    assert source.count("\n") <= 400, "a file this long holds two nouns"
    assert ast.get_docstring(ast.parse(source)) or module.name == "__init__.py"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_everything_public_is_documented(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}: {node.name}"
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                        overrides = node.bases and member.name in ("read", "submit", "head", "open", "begin")
                        assert ast.get_docstring(member) or overrides or _trivial(node), (
                            f"{module}: {node.name}.{member.name}"
                        )


def _trivial(node: ast.ClassDef) -> bool:
    """Implementations of a documented protocol."""
    return node.name.endswith("Reader") or any(
        isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
    )


def test_functions_fit_a_screen() -> None:
    for module in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
            if isinstance(node, ast.FunctionDef):
                body = [line for line in node.body if not isinstance(line, ast.Expr)]
                lines = (node.end_lineno or 0) - (body[0].lineno if body else node.lineno)
                assert lines <= 60, f"{module}: {node.name} has {lines} lines"


def test_the_public_names() -> None:
    assert h5pack.__all__ == sorted(h5pack.__all__)
    for name in h5pack.__all__:
        assert getattr(h5pack, name) is not None
        assert name in dir(h5pack)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        h5pack.nothing  # noqa: B018


def test_help_is_light_and_quick() -> None:
    code = (
        "import sys, h5pack.cli\n"
        "try: h5pack.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'h5py', 'numpy', 'PIL', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "convert" in result.stdout


def test_converting_imports_no_torch() -> None:
    code = (
        "import sys, h5pack.pack.converter, h5pack.tools.verify, h5pack.tools.info; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
