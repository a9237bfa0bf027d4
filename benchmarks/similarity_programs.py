"""Programs for function similarity: Debian's sources, by two compilers, each at five levels.

Below CACHE/similarity lie, as of `program_pairs.py`,

    programs/PROJECT-VERSION/COMPILER-LEVEL/PROJECT    stripped: what is lifted
    debug/PROJECT-VERSION/COMPILER-LEVEL/PROJECT       the same with debug information: its names
    logs/PROJECT-COMPILER-LEVEL.log                    what a compiler said that failed
    built.json                                         versions of the compilers, what was left out

What was made is kept, so the same command goes on where it was stopped. Projects to learn from come
first. The projects that are held
out are also compiled by an older compiler that no other project sees (`OLDER`).

    python benchmarks/similarity_programs.py CACHE [--small]
"""

import argparse
import random
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from program_pairs import Made, Tree, done, keep
from programs import LEVELS, Failed, command_of, fetch, run
from similarity_projects import PROJECTS, SMALL, Project

COMPILERS = ("gcc", "clang")
OLDER, OLDER_LEVELS = "gcc-11", ("O0", "O3")
SPLITS = Path(__file__).with_name("similarity_splits.toml")
"""Split → its projects."""
FIRST = (("gcc", "O0"), ("gcc", "O3"), ("gcc", "Os"), ("clang", "O0"), ("clang", "O3"))
"""Ways in which a function is learned from first."""
SMALL_WAYS = (("gcc", "O0"), ("gcc", "O3"), ("clang", "O2"))
SEED = 1
"""Of the order of linking."""
EMPTY_MAIN = "int main(void) { return 0; }\n"


def splits() -> dict[str, list[str]]:
    """Return the projects of each split; `unseen` is in none of the other three."""
    found: dict[str, list[str]] = tomllib.loads(SPLITS.read_text())["splits"]
    return found


def in_order(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return what is compiled, as (project, compiler, level), the most useful first.

    Projects to learn from come before the others, and `FIRST` ways before the rest, so that there
    are many functions early. In each of these the quick projects come first.
    """
    place = {name: split for split, names in enumerate(splits().values()) for name in names}
    found = [(name, *way) for name in names for way in ways(name)]
    return sorted(found, key=lambda one: (place[one[0]] > 0, one[1:] not in FIRST, place[one[0]]))


def ways(name: str) -> list[tuple[str, str]]:
    """Return how a project is compiled: compiler and level."""
    found = [(compiler, level) for level in LEVELS for compiler in COMPILERS]
    held_out = splits()
    if name in (*held_out["test"], *held_out["unseen"]):
        found += [(OLDER, level) for level in OLDER_LEVELS]
    return found


def sources(name: str, made: Made, suite: str = "") -> Tree:
    """Return the unpacked sources of a project, of the release of this machine or of another."""
    path = fetch(PROJECTS[name].package, made.folder / "fetched", suite)
    return Tree(name, (path / ".version").read_text().strip(), path)


def write_made(project: Project, tree: Path, folder: Path) -> None:
    """Write what `configure` would, and an empty `main` of a library."""
    for name, text in project.made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((tree / text[1:]).read_text() if text.startswith("@") else text)
    if project.library:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.c").write_text(EMPTY_MAIN)


def build(tree: Tree, compiler: str, level: str, made: Made) -> None:
    """Compile one project in one way, where that was not done; `Failed` names the log.

    Objects are linked in the order of the names of their sources; if the level ends with
    `_shuffled`, in another.
    """
    if done(tree, compiler, level, made).exists():
        return
    project = PROJECTS[tree.project]
    folder, work = made.folder / "made" / tree.project, made.folder / "work"
    write_made(project, tree.path, folder)
    work.mkdir(exist_ok=True)
    files = sorted(project.files(tree.path))
    if project.library:
        files.append(folder / "main.c")
    optimisation, _, order = level.partition("_")
    if order:
        random.Random(SEED).shuffle(files)
    flags = [flag.format(tree=tree.path, made=folder) for flag in project.flags]
    # Debug information names the sources by their place below those of the project.
    words = (f"-{optimisation}", "-g", "-w", f"-ffile-prefix-map={tree.path}={tree.name}", *flags)
    if not compiler.startswith("clang"):
        # Where variables lie is in no graph, and takes gcc a fifth of its time.
        words = (*words, "-fno-var-tracking")
    log = made.folder / "logs" / f"{tree.project}-{compiler}-{level}.log"
    command = command_of(compiler, project.language)
    if shutil.which(command) is None:
        raise Failed("there is no such compiler")
    out = work / tree.project
    run(command, *words, "-o", out, *files, *project.libraries, log=log)
    log.unlink(missing_ok=True)
    keep([out], tree, compiler, level, made)
    out.unlink()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true", help=", ".join(SMALL))
    chosen = parser.parse_args(arguments)
    made = Made(chosen.cache.resolve() / ("similarity-small" if chosen.small else "similarity"))
    (made.folder / "fetched").mkdir(parents=True, exist_ok=True)
    failed: set[str] = set()
    trees: dict[str, Tree] = {}
    names = SMALL if chosen.small else tuple(PROJECTS)
    for name in names:
        try:
            trees[name] = sources(name, made)
        except Failed as error:
            made.left_out.append(f"{name}: {error}")
            failed.add(name)
    for name, compiler, level in in_order(list(trees)):
        if chosen.small and (compiler, level) not in SMALL_WAYS:
            continue
        try:
            build(trees[name], compiler, level, made)
        except Failed as error:
            made.left_out.append(f"{trees[name].name} with {compiler} at {level}: {error}")
            failed.add(name)
    return report(made, len(failed))


def report(made: Made, failed: int) -> int:
    """Write and say what lies there and what does not."""
    programs = made.programs()
    projects = {name.split("/")[0] for name in programs}
    made.write_about((*COMPILERS, OLDER))
    print(f"{made.folder}: {len(programs)} programs of {len(projects)} projects")
    if made.left_out:
        print(f"left out: {len(made.left_out)} builds of {failed} projects")
    for line in made.left_out:
        print(f"  {line}")
    return 0 if programs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
