"""Compile Triton kernels for GPUs that are not here, and count instructions in their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

POINTERS = {"pixels": "*u8", "constants": "*fp32", "draws": "*i32", "colors": "*i32"}
POINTERS |= {"rows": "*i32", "columns": "*i32"}
STORE_BYTES = {".128": 16, ".64": 8, ".U16": 2, ".U8": 1}


@dataclass(frozen=True)
class Loop:
    """What the main loop of a kernel consists of."""

    instructions_per_value: float
    before: int  # How many instructions stand before the loop.
    store_bytes: int  # How many bytes the widest store writes.
    load_bytes: int
    exchanges: bool  # Whether threads exchange values through shared memory anywhere in the kernel.
    exchanges_again: bool  # Whether they do so in the loop.
    spills: bool  # Whether registers are kept in memory.


def main_loop(function: Any, capability: int, dtype: str, constants: dict[str, Any], **parts: Any) -> Loop:
    """Compile a kernel for a GPU and disassemble its first loop that stores values.

    `constants` are its constexpr arguments. `parts` are: `warps`; `aligned`, the arguments divisible by 16; `ones`, the
    arguments that are 1.
    """
    code = disassembled(function, capability, dtype, constants, **parts)
    for address, text in code.items():
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump is None or int(jump[1], 16) >= address:
            continue
        loop = [text for at, text in code.items() if int(jump[1], 16) <= at <= address and "NOP" not in text]
        widths = {kind: [_bytes(text) for text in loop if kind in text] for kind in ("STG", "LDG")}
        if widths["STG"]:
            values = sum(widths["STG"]) / (4 if dtype == "fp32" else 2)
            exchanges, exchanges_again = (
                any(re.search(r"\b(BAR|LDS|STS|SHFL)\b", text) for text in part) for part in (code.values(), loop)
            )
            spills = any(re.search(r"\b(LDL|STL)\b", text) for text in code.values())
            before = sum(at < int(jump[1], 16) for at in code)
            stored, loaded = max(widths["STG"]), max(widths["LDG"])
            return Loop(len(loop) / values, before, stored, loaded, exchanges, exchanges_again, spills)
    raise AssertionError("no loop stores values")


def disassembled(function: Any, capability: int, dtype: str, constants: dict[str, Any], **parts: Any) -> dict[int, str]:
    """Return the instructions of a kernel by their addresses."""
    ptxas_folder = Path(pytest.importorskip("triton.backends.nvidia").__file__).parent / "bin"
    disassembler = ptxas_folder / "cuobjdump"
    if not disassembler.exists():
        pytest.skip("this Triton has no disassembler")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compiled(function, capability, dtype, constants, **parts))
        file.flush()
        listing = subprocess.run([disassembler, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", listing, re.MULTILINE)
    return {int(address, 16): text for address, text in lines}


def _bytes(text: str) -> int:
    """Return how many bytes an instruction loads or stores."""
    mnemonic = text.split("[")[0].split(" desc")[0]
    return next((size for suffix, size in STORE_BYTES.items() if suffix in mnemonic), 4)


def _compiled(
    function: Any,
    capability: int,
    dtype: str,
    constants: dict[str, Any],
    warps: int = 2,
    aligned: tuple[str, ...] = ("result", "constants"),
    ones: tuple[str, ...] = (),
) -> bytes:
    triton = pytest.importorskip("triton", minversion="3.3", reason="its compiler expects the arguments of 3.3")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Without its value, a constexpr would become an argument of type i32.
    known = {one.name: constants[one.name] for one in function.params if one.is_constexpr}
    constants = constants | known | dict.fromkeys(ones, 1)
    names = [parameter.name for parameter in function.params]
    signature = {name: POINTERS.get(name, "i32") for name in names} | {"result": f"*{dtype}"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "enable_fp_fusion": True}
    code: bytes = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
    return code
