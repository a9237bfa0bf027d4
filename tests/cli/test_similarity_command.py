"""`tokmill similarity`: real programs, vectors of which is known what comes out, and mistakes."""

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leveled_programs import LAYOUT, leveled
from making import quick_build, write_store
from tokmill import plugins
from tokmill.cli import main
from tokmill.similarity import query
from tokmill.similarity.commands.similarity_query import _print
from tokmill.similarity.functions import NAMES
from tokmill.similarity.query import Hit, Named
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store

Here = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store `s`, and vectors that are `right` and `flat`."""
    folder = tmp_path_factory.mktemp("similarity")
    store = quick_build("x86", str(leveled(folder / "in")), folder / "s", layout=LAYOUT)
    sources = [f"{one['project']}/{one['function']}" for one in store]
    names = sorted(set(sources))
    vectors = np.zeros((len(store), len(names)), np.float32)
    vectors[np.arange(len(store)), [names.index(one) for one in sources]] = 1
    np.save(folder / "right.npy", vectors)
    np.save(folder / "flat.npy", np.full((len(store), 5), 0.3, np.float32))
    with open(folder / "keys.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["project", "function", "compiler", "level", "program", "size"])
        for one in store:
            lines.writerow([one[key] for key in ("project", "function", "compiler", "level")]
                           + [one["program"] + one["function"] * one["function"].startswith("sub_"),
                              len(one["asm"])])  # fmt: skip
    return folder


def test_vectors_of_a_store(here: Here, made: Path) -> None:
    command = ("similarity", "eval", made / "right.npy", made / "flat.npy", made / "s",
               "--min-blocks", "3", "--baseline", "random")  # fmt: skip
    out, err = here(*command)
    assert "fewer blocks than asked for" in out and "same code on both sides" in out
    assert "8,192, 10,000 for O0-O3, O2-O3" in err
    assert "right is better than random" in err
    assert "flat is not shown to be better than random" in err
    found = json.loads(here(*command, "--json")[0])
    assert found["fingerprint"] == Store(made / "s").fingerprint
    for row in found["rows"]:
        recall = {(o["method"], o["pool"]): o["values"]["recall@1"]["mean"] for o in row["results"]}
        assert recall["right", 2] == 1
        assert recall["flat", 2] == recall["random", 2] == pytest.approx(0.5)


def test_vectors_of_others(here: Here, made: Path) -> None:
    command = ("similarity", "score", made / "right.npy", made / "keys.csv")
    out, err = here(*command)
    assert "without a column `code`" in err
    found = json.loads(here(*command, "--json")[0])
    assert [one["name"] for one in found["methods"]] == ["right", "random"]
    means = {
        (one["method"], one["pool"]): one["values"]["mrr"]["mean"]
        for one in found["rows"][0]["results"]
    }
    assert means["right", 2] == 1 > means["random", 2] and "right" in out


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("eval", "nothing"), 1, "there is no such store"),
        (("eval", "right.npy"), 1, "is a file, not a store"),
        (("eval", "no.npy", "s"), 1, "no.npy: there is no such file"),
        (("eval", "no-run", "s", "--baseline", "random"), 2, "this is neither a run"),
        (("eval", "s", "--baseline", "magic"), 2, "no baseline is called 'magic'"),
        (
            ("eval", "s", "--pairs", "O0-O1", "--baseline", "random"),
            2,
            "there is: O0-O2, O0-O3, O2-O3",
        ),
        (("eval", "in", "s", "--baseline", "random"), 2, "neither a run nor an .npy file"),
        (("score", "right.npy", "no.csv"), 1, "no.csv: there is no such file"),
        (("score", "right.npy", "s"), 1, "s: this is not a file"),
        (("score", "short.npy", "keys.csv"), 1, "there are 3 vectors and"),
        (("score", "nan.npy", "keys.csv"), 1, "row 4 is not finite (NaN or infinite), as are 2"),
        (("score", "text.npy", "keys.csv"), 1, "dtype <U1"),
        (("score", "line.npy", "keys.csv"), 1, "are not vectors"),
        (("score", "pickled.npy", "keys.csv"), 1, "nothing is unpickled"),
        (("score", "huge.npy", "keys.csv"), 1, "huge.npy"),
        (("score", "cut.npy", "keys.csv"), 1, "cut.npy"),
        (("score", "keys.csv", "keys.csv"), 1, "neither .npy nor .npz"),
        (("score", "/dev/null", "keys.csv"), 1, "this is not a file"),
        (("score", "right.npy", "/dev/null"), 1, "this is not a file"),
    ],
)
def test_mistakes(here: Here, made: Path, arguments: tuple[str, ...], code: int, what: str) -> None:
    right = np.load(made / "right.npy")
    for name, values in (
        ("short", right[:3]), ("text", np.full((len(right), 2), "x")), ("line", right[:, 0]),
        ("nan", np.where(np.isin(np.arange(len(right)), (4, 9))[:, None], np.nan, right)),
        ("pickled", np.full((len(right), 2), None)),
    ):  # fmt: skip
        np.save(made / f"{name}.npy", values, allow_pickle=True)
    data = (made / "right.npy").read_bytes()
    (made / "cut.npy").write_bytes(data[: len(data) // 2])
    shape = str(right.shape).encode()
    assert data.count(shape) == 1
    (made / "huge.npy").write_bytes(data.replace(shape, b"(%d, 9999999)" % len(right)))
    named = [made / one if (made / one).exists() else one for one in arguments[1:]]
    err = here("similarity", arguments[0], *named, code=code)[1]
    assert what in err and "hint: " in err, err


@pytest.mark.parametrize("verb", ["eval", "index"])
def test_a_store_whose_build_has_not_finished(
    here: Here, made: Path, tmp_path: Path, verb: str
) -> None:
    shutil.copytree(made / "s", tmp_path / "s")
    (tmp_path / "s/manifest.json").unlink()
    out = ["-o", "x"] if verb == "index" else []
    _, err = here("similarity", verb, made / "right.npy", tmp_path / "s", *out, code=1)
    assert "not complete" in err


@pytest.fixture(scope="module")
def graphs(made: Path) -> Path:
    """The folder with a store `g` that was built of graphs, and `ix`, an index of `right`."""
    for command in (
        ("cfg", made / "in", "-o", made / "graphs", "-q"),
        ("build", "x86", made / "graphs", "--layout", LAYOUT, "-o", made / "g", "-q"),
        ("similarity", "index", made / "right.npy", made / "g", "-o", made / "ix", "-q"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in command])
        assert ended.value.code == 0
    return made


def test_baselines_of_a_store_of_graphs(here: Here, graphs: Path) -> None:
    command = ("similarity", "eval", graphs / "right.npy", graphs / "g", "--min-blocks", "3",
               "--pairs", "O0-O3", "--json")  # fmt: skip
    found = json.loads(here(*command)[0])
    names = [one["name"] for one in found["methods"]]
    sums = ["right", "right + code", "right + facts"]
    assert names == [*sums, "random", *plugins.BASELINES]
    assert [one["baseline"] for one in found["methods"][:4]] == [False, False, False, True]
    mrr = {one["method"]: one["values"]["mrr"]["mean"] for one in found["rows"][0]["results"]}
    assert mrr["right"] == 1 and mrr["facts"] > mrr["random"] and mrr["facts"] > 0.7
    assert mrr["right + code"] > mrr["opcodes"] and mrr["right + facts"] >= mrr["ranker"]
    some = json.loads(here(*command, "--baseline", "facts")[0])
    assert [one["name"] for one in some["methods"]] == [*sums, "random", "facts"]
    alone = json.loads(here(*command, "--baseline", "random", "--alone")[0])
    assert [one["name"] for one in alone["methods"]] == ["right", "random"]
    # The same of a selection, which remembers where it came from.
    here("build", "select", graphs / "g", "--where", "level != O2", "-o", graphs / "some")
    of_selection = ("similarity", "eval", graphs / "some", "--min-blocks", "3",
                    "--baseline", "facts", "--json")  # fmt: skip
    assert len(json.loads(here(*of_selection)[0])["methods"]) == 2


def test_a_store_without_graphs_has_no_baselines(here: Here, made: Path) -> None:
    command = ("similarity", "eval", made / "s", "--min-blocks", "3")
    assert "note: no baselines but chance" in here(*command)[1]
    assert "no baselines but chance" in here(*command, "--baseline", "facts", code=2)[1]
    assert (
        "only tokens are known"
        in here("similarity", "query", made / "s", "--function", "walk", "--level", "O0", code=2)[1]
    )
    given = here(*command, "--graphs", graphs_of(here, made), "--baseline", "facts", "--json")[0]
    assert [one["name"] for one in json.loads(given)["methods"]] == ["random", "facts"]


def graphs_of(here: Here, made: Path) -> Path:
    here("cfg", made / "in", "-o", made / "graphs", "-q")
    return made / "graphs"


def test_the_functions_that_are_nearest(here: Here, graphs: Path) -> None:
    command = ("similarity", "query", graphs / "g", "--function", "search", "--level", "O0")
    found = json.loads(here(*command, "--json", "--top", "3")[0])
    assert found["by"] == "ranker" and found["asked"]["function"] == "search"
    for hit in found["hits"][:2]:
        assert hit["function"]["function"] == "search" and hit["function"]["level"] in ("O2", "O3")
        assert 0.3 < hit["score"] <= 1 + 1e-6
    assert len({hit["function"]["record"] for hit in found["hits"]}) == 3
    out = here(*command, "--top", "2")[0]
    assert out.startswith("search at 0x") and len(out.splitlines()) == 5
    alone = here(*command, "--others", "--json")[0]
    programs = {
        (h["function"]["project"], h["function"]["level"]) for h in json.loads(alone)["hits"]
    }
    assert ("second", "O0") not in programs and programs


@pytest.mark.parametrize("level", ["O0", "unknown"])
def test_columns_of_which_nothing_is_known_are_not_shown(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Named(0, "unknown", "app", "unknown", "unknown", level, "search", 0x1000)
    _print(one, "ranker", [Hit(0.5, one)])
    words = capsys.readouterr().out.splitlines()[1].split()
    known = ["level"] if level == "O0" else []
    assert words == ["score", "function", "address", "program", *known]


def test_indexes_of_vectors(here: Here, graphs: Path) -> None:
    out = here("similarity", "index", graphs / "right.npy", graphs / "g", "-o", graphs / "dense")[0]
    assert "records by right" in out
    command = ("similarity", "query", graphs / "dense", "--function", "words", "--level", "O3")
    found = json.loads(here(*command, "--top", "2", "--json")[0])
    assert [hit["function"]["function"] for hit in found["hits"]] == ["words", "words"]
    same = ("similarity", "query", graphs / "right.npy", graphs / "g", "--function", "words",
            "--level", "O3", "--top", "2", "--json")  # fmt: skip
    for more, by in ((("--alone",), "right"), ((), "right + facts")):
        again = json.loads(here(*same, *more)[0])
        assert again["by"] == by
        assert {hit["function"]["record"] for hit in again["hits"]} == {
            hit["function"]["record"] for hit in found["hits"]
        }


def test_functions_of_a_large_program_hide_no_others(here: Here, tmp_path: Path) -> None:
    """What is left out must not use up the places of what is shown."""
    schema = Schema({
        "token": Column(dtype="u1", per="token"),
        "address": Column(dtype="u8", per="record"),
        **{name: Column(dtype="utf8", per="record") for name in NAMES},
    })  # fmt: skip
    programs = ["large"] * 300 + ["small"] * 3
    same = dict.fromkeys(NAMES, "")
    rows = [
        {**same, "token": [1], "address": n, "function": f"f{n}", "program": program}
        for n, program in enumerate(programs)
    ]
    write_store(tmp_path / "s", schema, [rows])
    angles = np.arange(len(rows)) / 300
    np.save(tmp_path / "v.npy", np.stack([np.cos(angles), np.sin(angles)], 1))
    here("similarity", "index", tmp_path / "v.npy", tmp_path / "s", "-o", tmp_path / "ix")
    for given in ((tmp_path / "ix",), (tmp_path / "v.npy", tmp_path / "s", "--alone")):
        command = ("similarity", "query", *given, "--function", "f0", "--others", "--json")
        for top in (1, 2, 10):
            hits = json.loads(here(*command, "--top", str(top))[0])["hits"]
            names = [hit["function"]["function"] for hit in hits]
            assert names == ["f300", "f301", "f302"][:top]


def records(kinds: Sequence[str], rows: list[dict[str, Any]], folder: Path) -> Store:
    """Make a store of functions of one token, with columns of numbers for each."""
    schema = Schema({
        "token": Column(dtype="u1", per="token"),
        **{name: Column(dtype="u8", per="record") for name in kinds},
        **{name: Column(dtype="utf8", per="record") for name in NAMES},
    })  # fmt: skip
    write_store(
        folder, schema, [[dict.fromkeys(NAMES, "f") | {"token": [1]} | one for one in rows]]
    )
    return Store(folder)


def test_others_reads_no_name_of_the_own_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"address": n, "program": "own"} for n in range(99)]
    store = records(["address"], [*rows, {"address": 5, "program": "other"}], tmp_path / "s")
    asked = query.named(store, 3)
    read: list[int] = []
    known = query.named

    def counted(store: Store, record: int) -> Named:
        read.append(record)
        return known(store, record)

    monkeypatch.setattr(query, "named", counted)
    hits = query.hits_of(
        store,
        asked,
        lambda most: (np.arange(100)[:most], np.ones(100)[:most]),
        2,
        other_programs=True,
    )
    assert [hit.function.program for hit in hits] == ["other"]
    assert read == [99]


def test_walks_are_no_functions(here: Here, tmp_path: Path) -> None:
    rows = [{"address": 9, "walk": number} for number in range(2)]
    records(["address", "walk"], rows, tmp_path / "s")
    np.save(tmp_path / "v.npy", np.ones((2, 3)))
    given = (tmp_path / "v.npy", tmp_path / "s")
    for command in (("query", *given, "--function", "f"), ("index", *given, "-o", tmp_path / "i")):
        err = here("similarity", *command, code=2)[1]
        assert "the store holds walks" in err and "--unit function" in err, err


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("query", "g"), 2, "no function is named"),
        (("query", "g", "--function", "nobody"), 2, "no function has the name 'nobody'"),
        (("query", "ix", "--function", "walk"), 2, "3 functions have the name 'walk':\n  walk at"),
        (("query", "ix", "--address", "0x1", "--program", "a"), 2, "no function has the addre"),
        (("query", "ix", "--address", "xyz"), 2, "'xyz' is not an address"),
        (("query", "ix", "--address", "-1"), 2, "'-1' is not an address"),
        (("query", "right.npy", "ix", "--function", "walk"), 2, "an index has its vectors"),
        (("query", "right.npy", "flat.npy", "g", "--function", "w"), 2, "one kind of vectors"),
        (("query", "no", "--function", "walk"), 1, "there is no such store"),
        (("index", "right.npy", "g", "-o", "g"), 2, "this is a folder"),
        (("index", "right.npy", "g", "-o", "right.npy"), 2, "the file is not an index"),
        (("index", "g", "-o", "new"), 2, "no vectors are named"),
    ],
)
def test_mistakes_of_queries(
    here: Here, graphs: Path, arguments: tuple[str, ...], code: int, what: str
) -> None:
    named = [graphs / one if (graphs / one).exists() else one for one in arguments[1:]]
    err = here("similarity", arguments[0], *named, code=code)[1]
    assert what in err and "hint: " in err, err


def test_zeros_are_said_and_are_chance(here: Here, made: Path) -> None:
    right = np.load(made / "right.npy")
    right[::2] = 0
    np.save(made / "half.npy", right)
    err = here("similarity", "score", made / "half.npy", made / "keys.csv")[1]
    assert "with a vector of zeros" in err
