"""Commands at random for a long time, killed at random and continued: nothing may be lost or leak.

Before that each command runs once undisturbed; what the others leave has to be equal to the byte.
Beside them live a training, and a process that reads batches by address, samples
and queries an index: in the last third neither may hold more than in the one before.

    python benchmarks/soak.py FOLDER [--minutes 60] [--seed 1]
"""

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

TOKENIZER = f"--tokenizer {Path(__file__).parents[1]}/tests/golden/tokenizer.json"
TINY = "--set model.dim=32 --set model.layers=1 --set task.length=64 --set data.batch=4"
MORE = "--set steps=60 --set checkpoint_every=7 --set eval_every=20 --set model.dropout=0.1"
LONG = "--set steps=100000000 --set checkpoint_every=500 --set log_every=100 -q"
MEASURES = {"bytes": 24e6, "handles": 2, "threads": 2}
"""What a process that lives long holds, and by how much it may grow beside 3 %."""


def jobs(base: Path, out: Path, root: str, far: str, draw: random.Random) -> dict[str, list[str]]:
    """Return kind → commands; `far` is an address of their own."""
    store, at, workers = f"{base}-build/out", f"{root}/store", f"--workers {draw.randrange(3)}"
    lines, train = f"build jsonl {root}/in {TOKENIZER}", f"-o {out}/out {TINY} {MORE}"
    parts = [f"{lines} -o {out}/{n} --part {n}/2 --push {far}" for n in (1, 2)]
    draw.shuffle(parts)
    pull, index = f"store pull {far} -o {out}/out", f"{base}/vectors.npy {base}-programs/out"
    return {
        "build": [f"build jsonl {base}/in {TOKENIZER} -o {out}/out {workers}"],
        "by-address": [f"{lines} -o {out}/out {workers}"],
        "parts": [*parts, pull],
        "push-and-pull": [f"store push {store} {far}", pull],
        "train": [f"train {store} --val {store} {train}"],
        "train-by-address": [f"train {at} --val {at} {train}"],
        "programs": [f"build x86 {base}/programs --layout {LAYOUT} -o {out}/out {workers}"],
        "index": [f"similarity index {index} -o {out}/out/i"],
        "select": [f"build select {store} --unique -o {out}/out {workers}"],
        "export": [f"store export npz {at} -o {out}/out/e --max-length 64 --pad-id 1"],
    }


def left(kind: str, out: Path) -> dict[str, bytes]:
    """Return what has to be equal: of runs the weights, of an export what has no times."""
    some = (".safetensors", ".npz") if kind.startswith("train") or kind == "export" else ("",)
    return {k: v for k, v in contents(out).items() if k.endswith(some) and "/." not in f"/{k}"}


def run(line: str, log: Path, kill: tuple[float, str] | None = None) -> int:
    """Run a command; `kill`: after so many seconds it, or with all its workers, gets a signal."""
    with log.open("a") as file:
        print("$", line, kill, file=file, flush=True)
        words = [sys.executable, "-m", "tokmill", *line.split()]
        child = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
        try:
            return child.wait(kill[0] if kill else 900)
        except subprocess.TimeoutExpired:
            assert kill, f"no end: {line}"
            number = signal.SIGTERM if kill[1] == "ends" else signal.SIGKILL
            (os.killpg if kill[1] == "group" else os.kill)(child.pid, number)
            return child.wait(300)


class Soak:
    def __init__(self, folder: Path, far: str, seed: int) -> None:
        self.folder, self.far, self.draw = folder, far, random.Random(seed)
        self.seconds, self.whole = dict[str, float](), dict[str, dict[str, bytes]]()
        self.done, self.killed, self.wrong = Counter[str](), Counter[str](), list[str]()
        self.number, base = 0, folder / "base"
        for name in ending_names(12):
            remote.put(f"{far}/in/{name}", write_jsonl(base / "in" / name, 150_000), "")
        leveled(base / "programs")
        for kind in jobs(base, base, far, far, self.draw):
            where, begun = folder / f"base-{kind}", time.monotonic()
            for line in jobs(base, where, far, f"{far}/base-{kind}", self.draw)[kind]:
                assert run(line, folder / "base.log") == 0, line
            self.seconds[kind], self.whole[kind] = time.monotonic() - begun, left(kind, where)
            if kind == "build":
                push(where / "out", f"{far}/store")
            if kind == "programs":
                vectors = np.random.default_rng(0).random((len(tokmill.Store(where / "out")), 16))
                np.save(base / "vectors.npy", vectors.astype(np.float32))

    def job(self) -> None:
        self.number += 1
        draw, name = random.Random(self.draw.random()), f"job{self.number}"
        kind = draw.choice(list(self.whole))
        out, far, log = self.folder / name, f"{self.far}/{name}", self.folder / f"{name}.log"
        lines = jobs(self.folder / "base", out, self.far, far, draw)[kind]
        for line in lines:
            kills, code = draw.randrange(5), -1
            while code:
                after = draw.uniform(0.1, 1.2) * self.seconds[kind] / len(lines)
                how = draw.choice(["group", "group", "alone", "ends"])
                code, kills = run(line, log, (after, how) if kills > 0 else None), kills - 1
                self.killed[kind] += code != 0
                if code not in (0, -9, -15, 3, 5) or kills < -9:
                    raise AssertionError(f"{name}: exit code {code}: {line}")
                time.sleep(5 * (code == 5))  # Workers of one that was killed may hold the folder.
        assert left(kind, out) == self.whole[kind], f"{name}, {kind}: not equal"
        self.done[kind] += 1
        shutil.rmtree(out)
        for one in remote.listed(far):
            obstore, client, key = remote._client(one.address)
            obstore.delete(client, key)

    def work(self, ends: float) -> None:
        while time.monotonic() < ends:
            try:
                self.job()
            except Exception as error:
                self.wrong.append(repr(error))


def live(folder: Path, far: str) -> None:
    """Read, sample and query until the end."""
    index, answers = Index(folder / "base-index/out/i"), set[str]()
    near = index.nearest(index.vectors[0], 5)[0].tolist()
    for turn in range(1 << 40):
        if turn % 20 == 0:
            feed = tokmill.Feed(tokmill.Windows(tokmill.Store(f"{far}/store"), 64), 8, seed=1)
            answers.add(tokmill.sample(folder / "base-train/out", "record", tokens=5, seed=1))
        feed.batch(turn)
        assert len(answers) == 1 and index.nearest(index.vectors[0], 5)[0].tolist() == near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
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
        ends, children = time.monotonic() + 60 * given.minutes, {}
        train = f"-m tokmill train {folder}/base-build/out -o {folder}/long {TINY} {LONG}"
        for name, line in {"live": f"{__file__} {folder} --live {soak.far}",
                           "train": train}.items():  # fmt: skip
            log = (folder / f"{name}.log").open("w")
            words = [sys.executable, *line.split()]
            children[name] = subprocess.Popen(words, stdout=log, stderr=log)
        threads = [threading.Thread(target=soak.work, args=[ends]) for _ in range(2)]
        for thread in threads:
            thread.start()
        seen = [{}]
        while any(thread.is_alive() for thread in threads):
            time.sleep(10)
            processes = {name: psutil.Process(child.pid) for name, child in children.items()}
            if all(child.poll() is None for child in children.values()):
                seen.append({n: (p.memory_full_info().uss, p.num_fds(), p.num_threads())
                             for n, p in processes.items()})  # fmt: skip
            with (folder / "seen.jsonl").open("a") as file:
                file.write(json.dumps([os.getloadavg(), seen[-1]]) + "\n")
        third = len(seen) // 3
        for name, child in children.items():
            if child.poll() is not None:
                soak.wrong.append(f"{name} ended: see {folder}/{name}.log")
            child.terminate()
            child.wait(120)
            for number, (what, slack) in enumerate(MEASURES.items()):
                rows = [row[name][number] for row in seen[1:]]
                first, last = map(statistics.median, (rows[third : 2 * third], rows[2 * third :]))
                print(f"{name}: {what} {first:,.0f} in the second third, {last:,.0f} in the last")
                if last > first * 1.03 + slack:
                    soak.wrong.append(f"{name} grows: {what} {first} to {last}")
    for kind in soak.whole:
        print(f"{kind}: {soak.done[kind]} equal, {soak.killed[kind]} ends before the end")
    print(*soak.wrong, sep="\n")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
