"""Commands at random for a long time, killed at random and continued: nothing may be lost or leak.

Before that each command runs once undisturbed; what the others leave has to be equal to the byte.
Beside them live a training that is pushed, and a process that reads batches by address, samples
and queries an index: at the end neither may hold more memory or handles than after a third.

    python benchmarks/soak.py FOLDER [--minutes 60] [--seed 1] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

import tokmill  # noqa: E402
from crash_stores import contents, ending_names, write_jsonl  # noqa: E402
from leveled_programs import LAYOUT, leveled  # noqa: E402
from object_servers import gateway, set_up  # noqa: E402
from tokmill.base import remote  # noqa: E402
from tokmill.similarity.index import Index  # noqa: E402
from tokmill.store.publish import push  # noqa: E402

TOKENIZER = Path(__file__).parents[1] / "tests/golden/tokenizer.json"
TRAIN = "steps=60 checkpoint_every=7 eval_every=20 model.dim=32 model.layers=1 model.dropout=0.1"
TRAIN += " task.length=64 data.batch=4 log_every=5 eval_rows=8"
SLACK = 24e6
"""Bytes by which a process that lives long may grow beside 3 %."""


def jobs(base: Path, out: Path, far: str, draw: random.Random) -> dict[str, list[str]]:
    """Return kind → commands, separated by `;`; `far` is an address that no other job uses."""
    store, jsonl = f"{base}-build/out", f"build jsonl {far.split('/job')[0]}/in --tokenizer"
    sets = " ".join(f"--set {one}" for one in TRAIN.split())
    at = f"{far.split('/job')[0]}/store"
    parts = [f"{jsonl} {TOKENIZER} -o {out}/{n} --part {n}/2 --push {far}" for n in (1, 2)]
    draw.shuffle(parts)
    lines = {
        "build": f"build jsonl {base}/in --tokenizer {TOKENIZER} -o {out}/out --workers {draw.randrange(3)}",
        "by address": f"{jsonl} {TOKENIZER} -o {out}/out --workers {draw.randrange(3)}",
        "parts": f"{parts[0]} ; {parts[1]} ; store pull {far} -o {out}/out",
        "push and pull": f"store push {store} {far} ; store pull {far} -o {out}/out",
        "train": f"train {store} --val {store} -o {out}/out {sets}",
        "train by address": f"train {at} --val {at} -o {out}/out {sets}",
        "train and push": f"train {store} --val {store} -o {out}/out {sets} --push {far}",
        "programs": f"build x86 {base}/programs --layout {LAYOUT} -o {out}/out --workers 2",
        "index": f"similarity index {base}/vectors.npy {base}-programs/out -o {out}/out/i --fresh",
        "select": f"build select {store} --unique -o {out}/out",
        "export": f"store export npz {at} -o {out}/out/e --max-length 64 --pad-id 1",
    }
    return {kind: line.split(" ; ") for kind, line in lines.items()}


def left(kind: str, out: Path) -> dict[str, bytes]:
    """Return what has to be equal: of runs the weights, of an export what has no times."""
    found = contents(out)
    if "train" in kind or kind == "export":
        names = [name for name in found if name.endswith((".safetensors", ".npz"))]
        return {name: found[name] for name in names}
    return {name: data for name, data in found.items() if not name.startswith(".")}


def run(line: str, log: Path, kill: tuple[float, str] | None = None) -> int:
    """Run a command; `kill`: after so many seconds it, or with all its workers, gets a signal."""
    with log.open("ab") as file:
        file.write(f"$ {line} # {kill}\n".encode())
        file.flush()
        command = [sys.executable, "-m", "tokmill", *line.split()]
        child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            return child.wait(kill[0] if kill else 600)
        except subprocess.TimeoutExpired:
            assert kill, f"no end: {line}"
            if kill[1] == "group":
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.send_signal(signal.SIGKILL if kill[1] == "alone" else signal.SIGTERM)
            return child.wait(120)


class Soak:
    def __init__(self, folder: Path, far: str, seed: int) -> None:
        self.folder, self.far, self.draw = folder, far, random.Random(seed)
        self.seconds: dict[str, float] = {}
        self.whole: dict[str, dict[str, bytes]] = {}
        self.done, self.killed, self.wrong = Counter[str](), Counter[str](), list[str]()
        self.number = 0

    def prepare(self) -> None:
        base = self.folder / "base"
        for name in ending_names(12):
            remote.put(f"{self.far}/in/{name}", write_jsonl(base / "in" / name, 150_000), "")
        leveled(base / "programs")
        for kind in jobs(base, base, self.far, self.draw):
            where = self.folder / f"base-{kind}".replace(" ", "-")
            begun = time.monotonic()
            for line in jobs(base, where, f"{self.far}/job-{kind}".replace(" ", "-"), self.draw)[
                kind
            ]:
                assert run(line, self.folder / "base.log") == 0, line
            self.seconds[kind], self.whole[kind] = (
                time.monotonic() - begun,
                left(kind, where / "out"),
            )
            if kind == "build":
                push(where / "out", f"{self.far}/store")
            if kind == "programs":
                count = len(tokmill.Store(where / "out"))
                np.save(
                    base / "vectors.npy", np.random.default_rng(0).random((count, 16), np.float32)
                )
            print(f"{kind}: {self.seconds[kind]:.1f} s undisturbed", flush=True)

    def job(self) -> None:
        self.number += 1
        number, draw = self.number, random.Random(self.draw.random())
        kind = draw.choice(list(self.whole))
        out, far = self.folder / f"job{number}", f"{self.far}/job{number}"
        out.mkdir()
        log, lines = (
            self.folder / f"job{number}.log",
            jobs(self.folder / "base", out, far, draw)[kind],
        )
        for line in lines:
            for kills in range(9):
                after = draw.uniform(0.1, 1.2) * self.seconds[kind] / len(lines)
                how = draw.choice(["group", "group", "alone", "ends"])
                code = run(line, log, (after, how) if kills < draw.randrange(5) else None)
                if code == 0:
                    break
                self.killed[kind] += 1
                if code not in (-9, -15, 3, 5) or kills == 8:
                    self.wrong.append(f"{kind} {number}: exit code {code}: {line}")
                    return
                if code == 5:  # Workers of one that was killed alone may still hold the folder.
                    time.sleep(5)
                if kind == "train and push" and draw.random() < 0.5:
                    shutil.rmtree(out / "out", ignore_errors=True)  # The machine is lost.
        if left(kind, out / "out") != self.whole[kind]:
            self.wrong.append(f"{kind} {number}: not equal")
            return
        self.done[kind] += 1
        shutil.rmtree(out)
        log.unlink()
        for one in remote.listed(far):
            remote.delete(one.address)


def live(folder: Path, far: str) -> None:
    """Read, sample and query until the end."""
    index, answers = Index(folder / "base-index/out/i"), set[str]()
    near = index.nearest(index.vectors[0], 5)[0].tolist()
    for turn in range(1 << 40):
        if turn % 20 == 0:
            feed = tokmill.Feed(tokmill.Windows(tokmill.Store(f"{far}/store"), 64), 8, seed=1)
        feed.batch(turn)
        run = folder / "base-train/out"
        answers.add(tokmill.sample(run, "record", tokens=5, seed=1) if turn % 5 == 0 else "")
        assert len(answers) <= 2 and index.nearest(index.vectors[0], 5)[0].tolist() == near


def measured(child: subprocess.Popen[Any]) -> tuple[int, int, int]:
    """Return the memory, the handles and the threads of a process."""
    one = psutil.Process(child.pid)
    return one.memory_full_info().uss, one.num_fds(), one.num_threads()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--live", default="")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.live:
        return live(folder, given.live)
    folder.mkdir(parents=True)
    with gateway(folder) as (port, bucket), pytest.MonkeyPatch.context() as patched:
        set_up(port, folder, patched)
        os.environ |= {"TOKMILL_CACHE_LIMIT": "3MB", "TOKMILL_PATIENCE": "60"}
        soak = Soak(folder, f"s3://{bucket}/soak", given.seed)
        soak.prepare()
        ends = time.monotonic() + 60 * given.minutes
        line = f"train {folder}/base-build/out -o {folder}/long --push {soak.far}/long"
        line += " --set steps=100000000 --set checkpoint_every=500 --set model.dim=32"
        line += " --set model.layers=1 --set task.length=64 --set data.batch=4 --set log_every=100"
        long = {"live": [__file__, str(folder), "--live", soak.far],
                "train": ["-m", "tokmill", *line.split(), "-q"]}  # fmt: skip
        children = {
            name: subprocess.Popen(
                [sys.executable, *words],
                stdout=(folder / f"{name}.log").open("wb"),
                stderr=subprocess.STDOUT,
            )
            for name, words in long.items()
        }

        def work() -> None:
            while time.monotonic() < ends:
                try:
                    soak.job()
                except Exception as error:
                    soak.wrong.append(repr(error))

        threads = [threading.Thread(target=work) for _ in range(given.jobs)]
        for thread in threads:
            thread.start()
        seen: dict[str, list[tuple[int, int, int]]] = {name: [] for name in children}
        while any(thread.is_alive() for thread in threads):
            time.sleep(10)
            for name, child in children.items():
                if child.poll() is None:
                    seen[name].append(measured(child))
            with (folder / "seen.jsonl").open("a") as file:
                now = {name: rows[-1:] for name, rows in seen.items()}
                file.write(json.dumps({"load": os.getloadavg(), **now}) + "\n")
        for name, child in children.items():
            if child.poll() is not None:
                soak.wrong.append(f"{name} ended: see {folder}/{name}.log")
                continue
            child.terminate()
            child.wait(120)
            third = len(seen[name]) // 3
            for what, rows in zip(("bytes", "handles", "threads"), zip(*seen[name]), strict=True):
                first, last = (
                    statistics.median(part) for part in (rows[third : 2 * third], rows[-third:])
                )
                print(f"{name}: {what} {first:,.0f} in the second third, {last:,.0f} in the last")
                if last > first * 1.03 + (SLACK if what == "bytes" else 2):
                    soak.wrong.append(f"{name} grows: {what} {first} → {last}")
        for kind in soak.whole:
            print(f"{kind}: {soak.done[kind]} equal, {soak.killed[kind]} kills or refusals")
    print(*soak.wrong, sep="\n")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
