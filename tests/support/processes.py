"""Commands of this checkout in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds after which what hangs is ended; none of them takes a tenth of it


def run_python(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with this process's packages and return how it ended and what it said."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def torchrun(count: int, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, in as many processes as torchrun starts on this machine."""
    launch = ("--standalone", f"--nproc-per-node={count}")
    return run_python("-m", "torch.distributed.run", *launch, *arguments, cwd=cwd)
