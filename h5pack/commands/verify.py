"""The command `h5pack verify`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command and its arguments to the parser."""
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check a pack's structure and every row's checksum",
        description="Check a pack's structure and every row's checksum; exit status 1 if anything is damaged.",
    )
    verify.set_defaults(run=run, parser=verify)
    verify.add_argument("file", metavar="FILE")
    verify.add_argument(
        "--workers",
        dest="num_workers",
        type=int,
        metavar="N",
        help="processes (default: the CPUs this process may use)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify a pack and print the report; return the exit status, 1 if anything is damaged."""
    from h5pack.inspect.verify import verify

    report = verify(arguments.file, num_workers=arguments.num_workers, progress=not arguments.json)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else report.to_text())
    return 0 if report.ok else 1
