"""A training loop that can be killed and resumed: ``python examples/resume.py FILE STATE``.

Kill it and run it again: the digest at the end is that of an uninterrupted run. It stands for a model, because it
depends on every row and on their order.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import h5pack

EPOCHS, BATCH, STEPS_BETWEEN_SAVES = 3, 64, 10


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically: a kill leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(state))
    os.replace(partial, path)


def main() -> None:
    file, state_path = sys.argv[1], Path(sys.argv[2])
    dataset = h5pack.H5Dataset(file, with_rows=True)
    loader = h5pack.H5Loader(dataset, BATCH, seed=1)
    steps, digest = 0, 0
    if state_path.exists():
        state = json.loads(state_path.read_text())
        steps, digest = state["steps"], state["digest"]
        loader.load_state_dict(state["loader"])
        print(f"resumed after step {steps}")
    for epoch in range(loader.state_dict()["epoch"], EPOCHS):
        for batch in loader:
            time.sleep(0.02)  # A training step.
            digest = zlib.crc32(batch[-1].numpy(), digest)
            steps += 1
            if steps % STEPS_BETWEEN_SAVES == 0:
                save(state_path, {"loader": loader.state_dict(), "steps": steps, "digest": digest})
        print(f"epoch {epoch} done, step {steps}")
    state_path.unlink(missing_ok=True)
    print(f"{steps} steps, digest {digest:08x}")


if __name__ == "__main__":
    main()
