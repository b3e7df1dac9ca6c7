"""A process of its own for each measurement of the comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_memory import MemoryWatch

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class PeerProcess:
    """Starts jobs of `benchmarks.peer_worker`, one after another.

    Attributes
    ----------
    python : str
        The interpreter; h5pack must be importable there.
    folder : Path
        For jobs, reports and the peers' own temporary files.
    most_seconds : float
        A job that takes longer is ended.
    """

    python: str
    folder: Path
    most_seconds: float = 600

    def run(self, job: dict[str, Any], watch: bool = False) -> dict[str, Any]:
        """Do a job in a fresh process.

        Parameters
        ----------
        job : dict
        watch : bool
            Watch its memory: the report gets "peak", bytes.

        Returns
        -------
        dict
            The report; with "error" where the process failed, was killed, or took too long.
        """
        job_path, report_path, log_path = (self.folder / name for name in ("job.json", "report.json", "log.txt"))
        report_path.unlink(missing_ok=True)
        job_path.write_text(json.dumps(job))
        # Peers leave temporary files behind, some in the home folder: here they go with the rest.
        environment = {
            **os.environ,
            "TMPDIR": str(self.folder),
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        command = [self.python, "-m", "benchmarks.peer_worker", str(job_path), str(report_path)]
        with log_path.open("wb") as log:
            # A session of its own: all its processes can be found, and ended, whatever their parents are.
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                return {"error": f"cannot be started: {error.strerror}"}
            peak = None
            try:
                if watch:
                    with MemoryWatch(process.pid) as memory:
                        process.wait(self.most_seconds)
                    peak = memory.peak
                else:
                    process.wait(self.most_seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {self.most_seconds:.0f} s"}
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not report_path.exists():
            return {"error": f"ended with {process.returncode}: {_last_line(log_path)}"}
        report: dict[str, Any] = json.loads(report_path.read_text())
        return report if peak is None else {**report, "peak": peak}


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
