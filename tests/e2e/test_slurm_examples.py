"""examples/slurm: its scripts, run by an `sbatch`, `srun` and `scontrol` that play a cluster here.

docs/log/2026-11-26-slurm.md has the same on a real one.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import tokmill
from tokmill.base.errors import UsageError
from tokmill.cli.build_command import array_part
from tokmill.store.store import Store
from toy import cycles, make_store

EXAMPLES = Path(__file__).parents[2] / "examples/slurm"
TOKENIZER = Path(__file__).parents[1] / "golden/tokenizer.json"

SRUN = """#!/bin/bash
# The command on each node, at the same time; the worst exit code.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || code=$?; done
exit ${code:-0}
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2 $3" == "show hostnames node[1-2]" ]] && printf '127.0.0.1\\nnode2\\n'
"""


def variables(script: str) -> dict[str, str]:
    """What `#SBATCH --name=value` says."""
    text = (EXAMPLES / script).read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))


def start(script: str, folder: Path, **given: object) -> subprocess.Popen[str]:
    """A job with these variables."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = f"{binaries}:{Path(sys.executable).parent}:{kept['PATH']}"
    return subprocess.Popen(
        ["bash", EXAMPLES / script],
        cwd=folder,
        env={**kept, "PATH": path, **{name: str(value) for name, value in given.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(jobs: Iterable[subprocess.Popen[str]]) -> list[str]:
    said = []
    for job in jobs:
        out, err = job.communicate(timeout=300)
        assert job.returncode == 0, err
        said.append(out + err)
    return said


def array(task: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    values = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def test_an_array_builds_the_store_of_one_process(tmp_path: Path) -> None:
    for name in "abcdefghij":
        lines = (json.dumps({"text": f"{name} says {i} " * 20}) for i in range(200))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = json.dumps([str(path) for path in sorted(tmp_path.glob("*.jsonl"))])
    for out in ("parts", "whole"):
        (tmp_path / f"{out}.toml").write_text(
            f'source = "jsonl"\ninputs = {inputs}\nout = "{tmp_path / out}"\n'
            f'tokenizer = "{TOKENIZER}"\n'
        )
    given = {"RECIPE": tmp_path / "parts.toml", "SLURM_CPUS_PER_TASK": 1}
    end([start("build.sbatch", tmp_path, **given, **array(i, 0, 8, 3, 4)) for i in (0, 4)])
    assert Store(tmp_path / "parts").partial or len(Store(tmp_path / "parts").shards) < 3
    end([start("build.sbatch", tmp_path, **given, **array(8, 0, 8, 3, 4))])
    (said,) = end([start("finish.sbatch", tmp_path, **given)])
    assert "nothing was left to do" in said
    end([start("finish.sbatch", tmp_path, **{**given, "RECIPE": tmp_path / "whole.toml"})])
    parts, whole = (
        {path.name: path.read_bytes() for path in (tmp_path / out).glob("shards/*.safetensors")}
        for out in ("parts", "whole")
    )
    assert parts == whole and whole
    assert Store(tmp_path / "parts").fingerprint == Store(tmp_path / "whole").fingerprint
    manifests = [(tmp_path / out / "manifest.json").read_bytes() for out in ("parts", "whole")]
    assert manifests[0] == manifests[1]
    assert variables("build.sbatch")["array"] == "1-4" and "requeue" in variables("build.sbatch")


def test_which_part_a_task_of_an_array_is() -> None:
    assert [array_part(array(i, 1, 4, 4)) for i in (1, 2, 4)] == [(1, 4), (2, 4), (4, 4)]
    assert [array_part(array(i, 5, 11, 3, 3)) for i in (5, 8, 11)] == [(1, 3), (2, 3), (3, 3)]
    assert array_part(array(7, 7, 7, 1)) == (1, 1)
    for gap in (array(3, 1, 7, 3), array(6, 5, 11, 3, 3), array(9, 1, 4, 4), array(0, 1, 4, 4)):
        with pytest.raises(UsageError, match="no regular row"):
            array_part(gap)
    for lacking in array(1, 1, 2, 2):
        given = {name: value for name, value in array(1, 1, 2, 2).items() if name != lacking}
        with pytest.raises(UsageError, match=f"{lacking} is 'not set', so this is not a task"):
            array_part(given)
    with pytest.raises(UsageError, match="is '٤'"):
        array_part(array(1, 1, 4, 4) | {"SLURM_ARRAY_TASK_COUNT": "٤"})


@pytest.mark.long
def test_a_training_over_two_nodes(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", cycles(40))
    (tmp_path / "recipe.toml").write_text(
        f'data = {{train = "{store}", batch = 8}}\nmodel = {{dim = 16, layers = 1, heads = 2}}\n'
        'task = {length = 16}\nrun = {steps = 6, device = "cpu"}\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = start(
        "train.sbatch", tmp_path, RECIPE=tmp_path / "recipe.toml", RUN=tmp_path / "run",
        SLURM_NNODES=2, SLURM_JOB_NODELIST="node[1-2]", PORT=port,
    )  # fmt: skip
    end([job])
    (line,) = (tmp_path / "run/sessions.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "processes": 2}
    seen = tokmill.Run(tmp_path / "run").trace(6)
    assert {one.process for one in seen} == {0, 1}
