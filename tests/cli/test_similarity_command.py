"""`tokmill similarity`: real programs, vectors of which is known what comes out, and mistakes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from leveled_programs import LAYOUT, leveled
from making import quick_build
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
               "--min-blocks", "3", "--pools", "2,5,5000", "--baseline", "random")  # fmt: skip
    out, err = here(*command)
    assert "fewer blocks than asked for" in out and "same code on both sides" in out
    assert "no pools of 5,000 for O0-O3, O2-O3" in err
    assert "right is better than random" in err
    assert "flat is not shown to be better than random" in err
    found = json.loads(here(*command, "--json")[0])
    assert found["fingerprint"] == Store(made / "s").fingerprint and found["protocol"] == "expected"
    for row in found["rows"]:
        recall = {(o["method"], o["pool"]): o["values"]["recall@1"]["mean"] for o in row["results"]}
        assert recall["right", 5] == 1
        assert recall["flat", 5] == recall["random", 5] == pytest.approx(0.2)
    shown = here(*command, "--full", "--by-size", "--by-project", "--metric", "mrr")[0]
    assert "O2-O3: gcc O2 → gcc O3: " in shown and "mrr, project" in shown and "mrr, size" in shown


def test_vectors_of_an_overlay(here: Here, made: Path) -> None:
    here("build", "overlay", made / "s", "--values", made / "right.npy", "--column", "v")
    for name in ("right", made / "s/overlays/right"):
        command = ("similarity", "eval", name, made / "s", "--baseline", "random", "--pools", "2")
        assert json.loads(here(*command, "--json")[0])["methods"][0]["name"] == "right"


def test_vectors_of_others(here: Here, made: Path) -> None:
    command = ("similarity", "score", made / "right.npy", made / "keys.csv", "--pools", "2,9")
    out, err = here(*command)
    assert "without a column `code`" in err
    found = json.loads(here(*command, "--json", "--protocol", "jtrans")[0])
    assert [one["name"] for one in found["methods"]] == ["right", "random"]
    means = {
        (one["method"], one["pool"]): one["values"]["mrr"]["mean"]
        for one in found["rows"][0]["results"]
    }
    assert means["right", 9] == 1 > means["random", 9] and "right" in out


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("eval", "nothing"), 1, "there is no such store"),
        (("eval", "right.npy"), 1, "is a file, not a store"),
        (("eval", "no.npy", "s"), 1, "no.npy: there is no such file"),
        (("eval", "no-overlay", "s", "--baseline", "random"), 2, "no overlay of the store"),
        (("eval", "../s/overlays/x", "s"), 2, "no overlay of the store"),
        (("eval", "s", "--baseline", "magic"), 2, "no baseline is called 'magic'"),
        (("eval", "s", "--metric", "f1"), 2, "no metric is called 'f1'"),
        (("eval", "s", "--pools", "2,x"), 2, "'x' is no number"),
        (("eval", "s", "--pools", "1"), 2, "a pool of 1"),
        (("eval", "s", "--pools", "-3"), 2, "'-3' is no number"),
        (("eval", "s", "--pairs", "O0-O1", "--baseline", "random"), 2, "there is: O0-O3, O2-O3"),
        (("eval", "s", "--protocol", "best", "--baseline", "random"), 2, "no protocol is called"),
        (("score", "right.npy", "no.csv"), 1, "no.csv: there is no such file"),
        (("score", "right.npy", "s"), 1, "s: this is no file"),
        (("score", "short.npy", "keys.csv"), 1, "there are 3 vectors and"),
        (("score", "nan.npy", "keys.csv"), 1, "row 4 is not finite (NaN or infinite), as are 2"),
        (("score", "text.npy", "keys.csv"), 1, "dtype <U1"),
        (("score", "line.npy", "keys.csv"), 1, "are no vectors"),
        (("score", "pickled.npy", "keys.csv"), 1, "nothing is unpickled"),
        (("score", "huge.npy", "keys.csv"), 1, "huge.npy"),
        (("score", "cut.npy", "keys.csv"), 1, "cut.npy"),
        (("score", "keys.csv", "keys.csv"), 1, "neither .npy nor .npz"),
        (("score", "/dev/null", "keys.csv"), 1, "this is no file"),
        (("score", "right.npy", "/dev/null"), 1, "this is no file"),
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


def test_zeros_are_said_and_are_chance(here: Here, made: Path) -> None:
    right = np.load(made / "right.npy")
    right[::2] = 0
    np.save(made / "half.npy", right)
    err = here("similarity", "score", made / "half.npy", made / "keys.csv", "--pools", "2")[1]
    assert "with a vector of zeros, as like to any as to any other" in err
