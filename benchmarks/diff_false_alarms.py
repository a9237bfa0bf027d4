"""False alarms of a diff: pairs of programs of the same source, in which no function changed.

    python benchmarks/diff_false_alarms.py FOLDER_OF_C [--each 12]

Each C file that can be compiled to a shared library is linked with two small objects of its own, by
gcc and clang at several levels, in pairs that differ in one way: see `PAIRS`. Printed are, by way,
the pairs, their functions, and how many are said to have changed, or have no partner.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

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
FLAGS = {
    "gcc -O0": "gcc -O0", "gcc -O2": "gcc -O2", "gcc -Os": "gcc -Os", "gcc -O3": "gcc -O3",
    "gcc -m32 -O2": "gcc -m32 -O2", "gcc -m32 -O0": "gcc -m32 -O0",
    "gcc -O2 at a fixed place": "gcc -O2 -fno-pie", "clang -O2": "clang -O2",
    "clang -O0": "clang -O0",
}  # fmt: skip
PAIRS = ("twice", "padding", "order of objects", "data in front", "data moved", "symbols")


class Builder:
    """Compiles in one folder; what cannot be compiled is left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def object(self, source: Path, flags: str, name: str) -> Path:
        """Return a compiled source."""
        out = self.folder / f"{name}.o"
        pic = [] if "-fno-pie" in flags else ["-fPIC"]
        by = [*flags.split(), "-w", "-g", *pic, f"-I{source.parent}"]
        # By a relative path, which `assert` keeps.
        self.run(*by, "-c", "-o", out.name, source.name, folder=self.folder)
        return out

    def link(self, flags: str, name: str, objects: list[Path], *more: str) -> Path:
        """Return a linked program without symbols that only a linker needs."""
        out = self.folder / name
        kind = ["-no-pie", "-static", "-Wl,--unresolved-symbols=ignore-all", "-Wl,-e,0"]
        kind = kind if "-fno-pie" in flags else ["-shared"]
        words = flags.split()
        bits = [word for word in words if word == "-m32"]
        self.run(words[0], *bits, *kind, "-nostdlib", "-Wl,--build-id=none", *more, "-o", out,
                 *objects)  # fmt: skip
        return out

    @staticmethod
    def run(*words: object, folder: Path | None = None) -> None:
        """Run a command; raises `subprocess.CalledProcessError`."""
        subprocess.run([str(word) for word in words], check=True, capture_output=True, cwd=folder)


def pairs_of(source: Path, flags: str, top: Path) -> dict[str, tuple[Path, Path]]:
    """Return way → two programs of one source."""
    found = {}
    first, second = (Builder(top / name) for name in ("one", "another/place"))
    for one in (first, second):
        one.folder.mkdir(parents=True)
        for name, text in (("front", FRONT), ("other", OTHER)):
            (one.folder / f"{name}.c").write_text(text)
        (one.folder / "main.c").write_bytes(source.read_bytes())
    main, other, front = (
        first.object(first.folder / f"{name}.c", f"{flags} -I{source.parent}", name)
        for name in ("main", "other", "front")
    )
    here = first.link(flags, "here", [main, other])
    again = [
        second.object(second.folder / f"{name}.c", f"{flags} -I{source.parent}", name)
        for name in ("main", "other")
    ]
    found["twice"] = here, second.link(flags, "again", again)
    wide = [
        first.object(
            first.folder / f"{name}.c",
            f"{flags} -I{source.parent} -falign-functions=64",
            f"{name}-wide",
        )
        for name in ("main", "other")
    ]
    found["padding"] = here, first.link(flags, "padded", wide)
    found["order of objects"] = here, first.link(flags, "turned", [other, main])
    found["data in front"] = here, first.link(flags, "behind", [front, main, other])
    moved = ["-Wl,--section-start=.rodata=0x90000", "-Wl,--section-start=.data=0xa0000"]
    if "-fno-pie" in flags:
        moved = [word.replace("=0x", "=0x4") for word in moved]
    found["data moved"] = here, first.link(flags, "moved", [main, other], *moved)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=12, help="most files of each folder")
    parser.add_argument("--show", action="store_true", help="name what is said to have changed")
    chosen = parser.parse_args()
    sources = [one for top in chosen.sources for one in sorted(top.glob("*.c"))[: chosen.each]]
    count: dict[str, Counter[str]] = {name: Counter() for name in PAIRS}
    left_out = 0
    for source in sources:
        for flags in FLAGS.values():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    pairs = pairs_of(source, flags, Path(folder))
                except subprocess.CalledProcessError as error:
                    left_out += 1
                    if chosen.show:
                        print(source.name, flags, error.stderr.decode()[:200], file=sys.stderr)
                    continue
                graphs = {}
                for both in pairs.values():
                    for path in both:
                        Builder.run("strip", "-o", f"{path}-stripped", path)
                        for one in (path, Path(f"{path}-stripped")):
                            if one not in graphs:
                                graphs[one] = lift(one, facts=True)
                for name, (a, b) in [*pairs.items(), ("symbols", (pairs["twice"][0],) * 2)]:
                    stripped = tuple(Path(f"{path}-stripped") for path in (a, b))
                    kinds = [(a, stripped[1])] if name == "symbols" else [(a, b), stripped]
                    for one, other in kinds:
                        diff = diff_graphs(graphs[one], graphs[other])
                        row = count[name]
                        row["pairs"] += 1
                        row["functions"] += len(graphs[one].function_address)
                        row["changed"] += int(diff.changed.sum())
                        row["without a partner"] += len(diff.deleted) + len(diff.inserted)
                        row["pairs with an alarm"] += not diff.same
                        if chosen.show and not diff.same:
                            show(source, flags, one, name, graphs[one], diff)
    headers = ("pairs", "functions", "changed", "without a partner", "pairs with an alarm")
    print("|", " | ".join(["way", *headers]), "|")
    print("|---" * (len(headers) + 1) + "|")
    for name, row in [*count.items(), ("all", sum(count.values(), Counter()))]:
        print("|", " | ".join([name, *(f"{row[header]:,}" for header in headers)]), "|")
    print(f"{left_out} programs could not be compiled")


def show(source: Path, flags: str, one: Path, name: str, graph: object, diff: object) -> None:
    """Name the functions that are said to have changed."""
    refs = getattr(diff, "references", None)
    changed = [
        (hex(graph.function_address[i]), graph.function_name[i])
        for i in diff.function_a[diff.changed].tolist()
    ]
    said = list(zip(refs.old, refs.new, strict=True))[:4] if refs else []
    print(source.name, flags, one.name, name, changed[:4], said, file=sys.stderr)


if __name__ == "__main__":
    main()
