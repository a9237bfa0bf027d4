"""Execution profiles of 20 Debian programs: block vectors, miss rates, measured and modelled CPI.

Each program runs once under callgrind and some times by itself, cut at the same marks (`tokmill bbv
profile --measured`). Below CACHE/profiles lie

    inputs/                    what the programs read: Python's own library as text, and scripts
    NAME.bb.gz .pc .map        basic block vectors, where blocks lie, what was mapped
    NAME.intervals.csv         instructions, CPI and miss rates of each interval
    NAME.about.json            the command, the weights of the model, how far two halves differ
    made.json                  the scale of the inputs, and why a program was left out

Programs that were profiled are kept, so the same command goes on where it was stopped.

    python benchmarks/profiles.py CACHE [--scale 0.3]
"""

import argparse
import json
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.bbv.traces.profile import Asked, profile

TEXT_BYTES = 12_000_000
"""Of a usual text at scale 1."""
SCALE = 0.3
"""Of the inputs: some 500 million instructions a program, which valgrind runs in a minute."""


@dataclass
class Inputs:
    """The files that programs read, made when they are first asked for."""

    folder: Path
    scale: float

    def path(self, name: str, write: Callable[[Path], None]) -> str:
        path = self.folder / name
        if not path.exists():
            draft = path.with_name(f"{name}.draft")
            write(draft)
            draft.rename(path)
        return str(path)

    def text(self, share: float = 1.0, first: int = 0) -> str:
        """Return a text of Python's library, of so many usual ones."""
        size = int(TEXT_BYTES * self.scale * share)

        def write(path: Path) -> None:
            sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
            data = b"".join(source.read_bytes() for source in sources[first:])
            path.write_bytes((data * (1 + size // len(data)))[:size])

        return self.path(f"text-{size}-{first}.txt", write)

    def script(self, name: str, text: str) -> str:
        return self.path(name, lambda path: path.write_text(text) and None)

    def times(self, count: int) -> int:
        return max(1, int(count * self.scale))


def c_source(functions: int) -> str:
    parts = ["extern int puts(const char *);"]
    for n in range(functions):
        cases = " ".join(f"case {k}: x = x * {k + n} + {n}; break;" for k in range(n % 7 + 2))
        parts.append(
            f"int f{n}(int x, int *p) {{ for (int i = 0; i < {n % 50 + 3}; i++) {{ switch (x & 7) "
            f"{{ {cases} default: p[i & 7] += x; }} x ^= p[(x + i) & 7]; }} "
            f'if (x > {n}) puts("f{n}"); return {f"f{n - 1}(x - 1, p)" if n else "x"}; }}'
        )
    return "\n".join(parts)


def sql(rows: int) -> str:
    return f"""create table t(a integer primary key, b text, c integer);
with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})
insert into t select i, hex(i * 7919) || 'x' || (i % 97), (i * 7919) % 1009 from n;
create index tb on t(b); create index tc on t(c);
select count(*), max(b) from t where b like '%3%';
select c, count(*), avg(a) from t group by c having count(*) > 2 order by 2 desc limit 5;
select sum(x.a * y.c) from t x join t y on x.c = y.a;
update t set b = b || c where c % 3 = 0; delete from t where c % 5 = 0;
select group_concat(b) from (select b from t order by b desc limit 100);
"""


def history(path: Path, text: str, commits: int) -> None:
    """Make a repository whose commits change a text here and there."""
    lines = Path(text).read_bytes().splitlines()[:20_000]
    draw = np.random.default_rng(1)
    stream = [b"reset refs/heads/main\n"]
    for number in range(commits):
        for at in draw.integers(0, len(lines), 40):
            lines[int(at)] = b"changed %d %d" % (number, at)
        data = b"\n".join(lines)
        stream.append(
            b"commit refs/heads/main\ncommitter a <a@b> %d +0000\ndata 1\nx\n"
            b"M 100644 inline a.txt\ndata %d\n%s\n" % (1_600_000_000 + number, len(data), data)
        )
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(path)], check=True)
    subprocess.run(
        ["git", "-C", str(path), "fast-import", "--quiet"], check=True, input=b"".join(stream)
    )


PERL = """my %c; my $n = 0; open F, '<', $ARGV[0];
while (<F>) { $n++; for my $w (/\\w+/g) { $c{$w}++ } s/self\\.(\\w+)/$1->/g; $l{length $_} .= $n; }
my @top = sort { $c{$b} <=> $c{$a} || $a cmp $b } keys %c; print "@top[0..9] $n\\n";
my @s = map { join '', sort split //, $_ } @top; print scalar(@s), "\\n";
"""
TCL = """set f [open [lindex $argv 0]]; set n 0
while {[gets $f line] >= 0} { incr n
 foreach w [regexp -all -inline {[a-z_]+} $line] { incr c($w) }
 lappend all [string length $line] }
set total 0; foreach x [lsort -integer $all] { set total [expr {($total * 31 + $x) % 65521}] }
puts "$n [array size c] $total"
"""
BASH = """declare -A c; n=0; t=0
mapfile -t lines < "$1"
for line in "${lines[@]}"; do
  for word in ${line//[^a-z ]/ }; do c[$word]=$(( ${c[$word]:-0} + 1 )); done
  t=$(( (t * 31 + ${#line}) % 65521 )); n=$((n + 1))
done
for word in "${!c[@]}"; do [[ $word == *self* ]] && t=$((t + c[$word])); done
echo $n $t ${#c[@]}
"""
PYTHON = """import re, sys
counts, total, lines = {}, 0, []
for line in open(sys.argv[1], errors="replace"):
    for word in re.findall(r"[a-z_]+", line):
        counts[word] = counts.get(word, 0) + 1
    total = (total * 31 + len(line.replace("self", "this").split())) % 65521
    lines.append(line[::-1])
lines.sort()
print(sorted(counts, key=counts.get)[-5:], total, len(lines[0]))
"""
MAWK = (
    '{ for (i = 1; i <= NF; i++) c[$i]++; n += length($0); gsub(/e/, "E"); s = s substr($0, 1, 1) }'
)
MAWK_END = "END { for (w in c) m += c[w] * length(w); print n, m, length(s) }"


def commands(inputs: Inputs) -> dict[str, Callable[[], list[str]]]:
    text, times = inputs.text, inputs.times

    def repository() -> str:
        return inputs.path(
            f"history-{times(120)}.git", lambda path: history(path, text(0.1), times(120))
        )

    def assembly() -> str:
        source = inputs.script(f"large-{times(900)}.c", c_source(times(900)))

        def write(path: Path) -> None:
            subprocess.run(["gcc", "-O1", "-S", source, "-o", str(path)], check=True)

        return inputs.path(f"large-{times(900)}.s", write)

    def json_lines(path: Path) -> None:
        lines = Path(text(0.015)).read_text(errors="replace").splitlines()
        rows = (
            {"n": n, "text": line, "words": line.split(), "even": n % 2 == 0}
            for n, line in enumerate(lines)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return {
        "gzip": lambda: ["gzip", "-1", "-c", text(3)],
        "bzip2": lambda: ["bzip2", "-c", text(0.6)],
        "xz": lambda: ["xz", "-T1", "-4", "-c", text(0.35)],
        "zstd": lambda: ["zstd", "-q", "--single-thread", "--no-asyncio", "-3", "-c", text(5)],
        "lz4": lambda: ["lz4", "-q", "-1", "-B4", "-c", text(3)],
        "perl": lambda: ["perl", inputs.script("a.pl", PERL), text(0.2)],
        "sqlite3": lambda: [
            "sqlite3", ":memory:", f".read {inputs.script(f'{times(60)}.sql', sql(times(60_000)))}"
        ],
        "git": lambda: ["git", "-C", repository(), "--no-pager", "log", "-p", "--no-ext-diff"],
        "od": lambda: ["od", "-A", "x", "-t", "x1z", text(0.3)],
        "as": lambda: ["as", assembly(), "-o", str(inputs.folder / "a.o")],
        "objdump": lambda: ["objdump", "-d", "--no-show-raw-insn", shutil.which("git") or "",
                            f"--stop-address={0x30000 + times(0x40000):#x}"],
        "sort": lambda: ["sort", "--parallel=1", "-S", "64M", text()],
        "bash": lambda: ["bash", inputs.script("a.sh", BASH), text(0.02)],
        "sed": lambda: ["sed", "-E", "s/([a-z]+)_([a-z]+)/\\2_\\1/g; /^#/d", text(0.4)],
        "mawk": lambda: ["mawk", f"{MAWK} {MAWK_END}", text(0.2)],
        "tclsh": lambda: ["tclsh", inputs.script("a.tcl", TCL), text(0.06)],
        "jq": lambda: [
            "jq", "-c", "select(.even) | {n, t: (.text | ascii_upcase), w: (.words | length)}",
            inputs.path(f"lines-{times(1000)}.jsonl", json_lines),
        ],
        "python3": lambda: [
            "/usr/bin/python3", "-S", inputs.script("a.py", PYTHON), text(0.25)
        ],
        "openssl": lambda: ["openssl", "enc", "-aria-256-cbc", "-K", "00" * 32, "-iv", "00" * 16,
                            "-in", text()],
        "bc": lambda: ["bc", "-lq", inputs.script(
            f"{times(900)}.bc", f"scale={times(900)}; 4*a(1); e(1); l(7); s(2)\nquit\n")],
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("cache", type=Path)
    options.add_argument("--scale", type=float, default=SCALE, help="size of the inputs")
    asked = options.parse_args()
    folder = asked.cache / "profiles"
    inputs = Inputs(folder / "inputs", asked.scale)
    inputs.folder.mkdir(parents=True, exist_ok=True)
    os.environ["LC_ALL"] = "C"
    os.environ["GIT_CONFIG_NOSYSTEM"] = "1"
    os.environ["PYTHONHASHSEED"] = "0"
    report = folder / "made.json"
    before = json.loads(report.read_text()) if report.exists() else {}
    if before.get("scale", asked.scale) != asked.scale:
        options.error(f"{folder} has programs at scale {before['scale']}: remove it, or --scale it")
    left_out: dict[str, str] = before.get("left_out", {})
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    how = Asked(measured=True, intervals=300, runs=25)
    table = commands(inputs)
    for name in table:
        if (folder / f"{name}.intervals.csv").exists():
            continue
        began = time.monotonic()
        left_out.pop(name, None)
        try:
            found = profile(table[name](), folder, how, name=name)
        except (TokmillError, subprocess.CalledProcessError, OSError) as error:
            left_out[name] = str(error).partition("\n")[0][:300]
            print(f"{name}: left out, {left_out[name]}", flush=True)
        else:
            cpi, timed = found.cpi["measured"], found.timed
            assert timed is not None
            print(
                f"{name}: {len(cpi)} intervals, {found.vectors.instructions.sum() / 1e6:,.0f} M "
                f"instructions, CPI {np.nanmean(cpi):.3f}, halves differ {timed.halves:.1%}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
        state = {"scale": asked.scale, "left_out": left_out}
        report.write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    main()
