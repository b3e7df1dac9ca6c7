"""Fixtures of the tests of clusters and array jobs."""

from tests.pack.conftest import fast_files_and_processes

__all__ = ["fast_files_and_processes"]
