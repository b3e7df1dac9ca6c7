"""The command `h5pack verify`: its arguments and its output."""

from __future__ import annotations

import argparse
from typing import Any

from h5pack.commands.arguments import add_workers, print_report


def add(commands: Any) -> None:
    """Add this command and its arguments to the parser."""
    verify = commands.add_parser(
        "verify",
        help="check a pack's structure and every row's checksum",
        description="Check a pack's structure and every row's checksum; exit status 1 if anything is damaged.",
    )
    verify.set_defaults(run=run)
    verify.add_argument("file", metavar="FILE")
    add_workers(verify)


def run(arguments: argparse.Namespace) -> int:
    """Verify a pack and print the report; return the exit status, 1 if anything is damaged."""
    from h5pack.inspect.verify import verify

    report = verify(arguments.file, num_workers=arguments.num_workers, progress=not arguments.json)
    print_report(report, arguments)
    return 0 if report.ok else 1
