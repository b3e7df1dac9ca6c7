"""`h5pack verify` on the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the program's."""
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check a pack's structure and every row's checksum",
        description="Check a pack's structure and every row's checksum; exit status 1 if anything is damaged.",
    )
    verify.set_defaults(run=run)
    verify.add_argument("file", metavar="FILE")
    verify.add_argument("--workers", type=int, metavar="N", help="processes (default: the CPUs this process may use)")


def run(arguments: argparse.Namespace) -> int:
    """Verify a pack; the exit status."""
    from h5pack.tools.report import verify_text
    from h5pack.tools.verify import verify

    report = verify(arguments.file, workers=arguments.workers, progress=not arguments.json)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else verify_text(report))
    return 0 if report.ok else 1
