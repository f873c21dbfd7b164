"""The Slurm script, in a shell whose programs say what they were called with."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "slurm" / "merge.sbatch"


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment where the script's programs write their names and arguments to ``calls``."""
    (tmp_path / "bin").mkdir()
    for name, more in {"mergekit-slta": "", "scontrol": "", "torchrun": "exec sleep 60"}.items():
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/bash\necho "$(basename "$0") $*" >> calls\n{more}\n')
        file.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


MERGE = "torchrun --standalone --nproc-per-node 4 -m mergekit_slta merge r.yml out --cuda --trust-remote-code"


def test_a_job_whose_time_is_up_is_requeued(tmp_path: Path, programs: dict[str, str]) -> None:
    command = ["bash", str(SCRIPT), "r.yml", "out", "--trust-remote-code"]
    job = subprocess.Popen(command, cwd=tmp_path, env=programs, stderr=subprocess.PIPE)
    while MERGE not in calls(tmp_path):
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert "goes back into the queue" in job.communicate(timeout=20)[1].decode() and job.returncode == 0
    assert calls(tmp_path)[-1] == "scontrol requeue 7"
