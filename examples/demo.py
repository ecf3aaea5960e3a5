"""What `make demo` runs: every usual way to start a job comes up, and two ranks train like one.

First `rallypoint verify` on the quick routes: real two-rank trainings, with torch as it is and with one
that was built without libuv. Then a small GPT with sharded optimizers through `rallypoint run`, by one
rank and by two, whose losses have to be the same. Exit code 0 if all of it worked, else 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_RALLYPOINT = [sys.executable, "-m", "rallypoint"]
_EXAMPLE = Path(__file__).parent / "train_sharded_optimizers.py"


def train(ranks: int, result: Path, *more: str) -> dict[str, Any] | None:
    """Train with so many ranks; what they measured, or None if that failed."""
    command = [*_RALLYPOINT, "run", f"--nproc-per-node={ranks}", str(_EXAMPLE), "--json", str(result), *more]
    print(f"\n$ rallypoint run --nproc-per-node={ranks} {_EXAMPLE.name} {' '.join(more)}", flush=True)
    # One thread each: two ranks on a small machine would only get in each other's way.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    if subprocess.run(command, env=environ, check=False).returncode:
        return None
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def main() -> int:
    """Run the demo; the exit code."""
    print("1. Every usual way to start a distributed job, each with a real training of two ranks", flush=True)
    verified = subprocess.run([*_RALLYPOINT, "verify", "--quick"], check=False).returncode == 0
    print("\n2. A small GPT with sharded AdamW and sharded Muon, by one rank and by two", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "one.json", Path(folder) / "two.json"
        alone = train(1, one)
        both = train(2, two, "--compare", str(one)) if alone else None
    print("\nSummary")
    verdict = "ok    " if verified else "FAILED"
    print(f"  {verdict}  jobs come up by every quick route, also on a torch without libuv")
    if alone is None or both is None:
        print("  FAILED  the training; what went wrong stands above")
        return 1
    shares = [max(run["optimizer_state_bytes"]) / 1024 for run in (alone, both)]
    print(f"  ok      the GPT's loss went from {both['losses'][0]:.3f} to {both['losses'][-1]:.3f},")
    print("          with two ranks as with one: the same batches gave the same losses")
    print(
        f"  ok      each of two ranks kept {shares[1]:.0f} KiB of optimizer state, one alone {shares[0]:.0f}"
    )
    print("\nNext: rallypoint run your_script.py, or rallypoint run -- torchrun ... as you always did")
    return 0 if verified else 1


if __name__ == "__main__":
    sys.exit(main())
