"""False alarms of a diff: pairs of programs of the same source, in which no function changed.

    python benchmarks/diff_false_alarms.py FOLDER_OF_C [--each 12]

Each C file that can be compiled to a shared library is linked with two small objects of its own, by
gcc and clang at several levels, in pairs that differ in one way (`pairs_of`). Printed are, by way,
the pairs, their functions, and how many are said to have changed, or have no partner.
"""

import argparse
import itertools
import subprocess
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from measure import markdown
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.lift.cfg import lift

FRONT = """
const char front_text[] = "in front"; const double front_numbers[] = {1.5, 2.25, -3};
int front_values[37] = {5, 6, 7}; char front_room[1234]; static const char *const names[] = {"a",
"bcd"}; const char *const *front_names = names; __thread int front_turns[3] = {4, 5}, front_left[9];
"""
OTHER = """
int other_value = 3; static int calls; const char *other_word(int n) { calls += n; return n == 1 ?
"once" : n == 2 ? "%d times" : "%u times"; } double other_share(double x) { return x * 0.75 +
other_value; } int other_step(int (*f)(int), int n) { switch (n) { case 0: return f(3); case 1:
return 17; case 2: return f(9) + calls; case 3: return n * 5; case 4: return f(n); case 5:
other_value++; } return -n; } __thread int other_turns = 6; static __thread long turned; int
other_turn(int n) { turned += n; return other_turns -= n; } long *other_turned(void) { return
&turned; }
"""
FLAGS = (
    "gcc -O0", "gcc -O2", "gcc -Os", "gcc -O3", "gcc -m32 -O2", "gcc -m32 -O0",
    "gcc -O2 -fno-pie", "clang -O2", "clang -O0",
)  # fmt: skip


def run(*words: object, folder: Path | None = None) -> None:
    """Run a command; raises `subprocess.CalledProcessError`."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True, cwd=folder)


def compiled(folder: Path, name: str, flags: str, *more: str) -> Path:
    """Return an object of the source NAME.c in a folder."""
    out = folder / f"{name}{''.join(more)}.o"
    pic = [] if "-fno-pie" in flags else ["-fPIC"]
    # By a relative path, which `assert` keeps.
    run(*flags.split(), "-w", "-g", *pic, *more, "-c", "-o", out.name, f"{name}.c", folder=folder)
    return out


def linked(out: Path, flags: str, objects: list[Path], *more: str) -> Path:
    """Return a linked program without symbols that only a linker needs."""
    kind = ["-no-pie", "-static", "-Wl,--unresolved-symbols=ignore-all", "-Wl,-e,0"]
    kind = kind if "-fno-pie" in flags else ["-shared"]
    compiler, *words = flags.split()
    bits = [word for word in words if word == "-m32"]
    run(compiler, *bits, *kind, "-nostdlib", "-Wl,--build-id=none", *more, "-o", out, *objects)
    return out


def pairs_of(source: Path, flags: str, top: Path) -> dict[str, tuple[Path, Path]]:
    flags = f"{flags} -I{source.parent.resolve()}"
    first, second = top / "one", top / "another/place"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "front.c").write_text(FRONT)
        (folder / "other.c").write_text(OTHER)
        (folder / "main.c").write_bytes(source.read_bytes())
    main, other, front = (compiled(first, name, flags) for name in ("main", "other", "front"))
    again, wide = (
        [compiled(folder, name, flags, *more) for name in ("main", "other")]
        for folder, more in ((second, ()), (first, ("-falign-functions=64",)))
    )
    moved = ["-Wl,--section-start=.rodata=0x90000", "-Wl,--section-start=.data=0xa0000"]
    if "-fno-pie" in flags:
        moved = [word.replace("=0x", "=0x4") for word in moved]
    here = linked(first / "here", flags, [main, other])
    return {
        "twice": (here, linked(second / "again", flags, again)),
        "padding": (here, linked(first / "padded", flags, wide)),
        "order of objects": (here, linked(first / "turned", flags, [other, main])),
        "data in front": (here, linked(first / "behind", flags, [front, main, other])),
        "data moved": (here, linked(first / "moved", flags, [main, other], *moved)),
    }


def stripped(path: Path) -> Path:
    out = path.with_name(f"{path.name}-stripped")
    run("strip", "-o", out, path)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=12, help="most files of each folder")
    chosen = parser.parse_args()
    sources = [one for top in chosen.sources for one in sorted(top.glob("*.c"))[: chosen.each]]
    count: dict[str, Counter[str]] = defaultdict(Counter)
    left_out = 0
    for source, flags in itertools.product(sources, FLAGS):
        with tempfile.TemporaryDirectory() as folder:
            try:
                pairs = pairs_of(source, flags, Path(folder))
            except subprocess.CalledProcessError:
                left_out += 1
                continue
            paths = {path for both in pairs.values() for path in both}
            whole = {path: lift(path, facts=True) for path in paths}
            bare = {path: lift(stripped(path), facts=True) for path in paths}
            here = pairs["twice"][0]
            for name, one, other in [
                *(
                    (n, graphs[a], graphs[b])
                    for n, (a, b) in pairs.items()
                    for graphs in (whole, bare)
                ),
                ("symbols", whole[here], bare[here]),
            ]:
                diff, row = diff_graphs(one, other), count[name]
                row["pairs"] += 1
                row["functions"] += len(one.function_address)
                row["changed"] += int(diff.changed.sum())
                row["without a partner"] += len(diff.deleted) + len(diff.inserted)
                row["pairs with an alarm"] += not diff.same
    headers = ("pairs", "functions", "changed", "without a partner", "pairs with an alarm")
    rows = [*count.items(), ("all", sum(count.values(), Counter()))]
    cells = [[name, *(f"{row[header]:,}" for header in headers)] for name, row in rows]
    print("\n".join(markdown(["way", *headers], cells)))
    print(f"{left_out} programs could not be compiled")


if __name__ == "__main__":
    main()
