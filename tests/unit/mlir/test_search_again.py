"""What was measured stands: a search that is repeated, or goes on, meets the same results."""

import hashlib
from pathlib import Path

import pytest

from tokmill.base.files import private_path, publish, remove_leftovers
from tokmill.cli import main
from tokmill.mlir import search
from tokmill.mlir.measure import Measurements, Result, Settings
from tokmill.mlir.modules import problem
from tokmill.mlir.modules.problem import Problem

GIVEN = problem.of_line("matmul 64 64 128")


class Made(Measurements):
    """Each new measurement says something else, as clocks do."""

    made = 0

    def _measure(self, given: Problem, schedule: str) -> Result:
        self.made += 1
        share = hashlib.sha256(f"{schedule} {self.made}".encode()).digest()[0] / 255
        return Result(status="ok", nanoseconds=1 + share, baseline=1.5, noise=0.001)


def test_a_search_meets_the_same_results_after_its_best_was_measured_again(
    tmp_path: Path,
) -> None:
    with Made(Settings(), tmp_path / "cache") as measure:
        first = list(search.evolution(GIVEN, measure, 48, 1))
        again = search.confirmed(GIVEN, [max(first, key=search.score).schedule], measure)
        assert again.result.nanoseconds != max(first, key=search.score).result.nanoseconds
        before = measure.made
        met = list(search.evolution(GIVEN, measure, 48, 1))
        assert [(one.schedule, one.result.nanoseconds) for one in met] == [
            (one.schedule, one.result.nanoseconds) for one in first
        ]
        assert measure.made == before


def test_a_file_of_another_program_takes_its_place_and_leftovers_of_it_go(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "others"
    # Another process may be writing a file whose name begins with this one's.
    for name in (path, other, tmp_path / "weights-of-others"):
        private_path(name).write_text("left by one that was killed")
    private = private_path(path)
    private.write_text("new")
    publish(private, path)
    assert path.read_text() == "new"
    assert remove_leftovers(tmp_path, path.name) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_weights_belong_to_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "weights.irpa"
    weights.touch()
    with pytest.raises(SystemExit) as ended:
        main(["rl", "tune", "matmul 8 8 8", "-o", str(tmp_path / "spec"), "--parameters",
              str(weights)])  # fmt: skip
    assert ended.value.code == 2
    assert "--parameters names the weights of a model" in capsys.readouterr().err
