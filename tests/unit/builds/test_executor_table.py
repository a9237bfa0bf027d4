"""Executors by name: what goes together, and what a node must see."""

import os
from pathlib import Path

import pytest

from tokmill.base.errors import MachineError, UsageError
from tokmill.builds.execution.executors import check_executor, choose
from tokmill.builds.plan import Amount
from tokmill.version import __version__


def test_what_does_not_go_together_is_refused_before_anything_is_read() -> None:
    refused = [
        ({"address": "a:1"}, "--executor NAME"),
        ({"executor": "pool"}, ""),
    ]
    for keys, hint in refused:
        with pytest.raises(UsageError) as caught:
            check_executor(Amount(**keys))  # type: ignore[arg-type]
        assert hint in caught.value.hint
    check_executor(Amount())


def test_how_many_workers_an_executor_has() -> None:
    workers, resources = choose(Amount(executor="ray"), 9)
    assert workers == 9 and not resources.threads
    assert choose(Amount(executor="ray", workers=4), 9)[0] == 4


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "somewhere", "host:port", "h:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    cluster = pytest.importorskip("tokmill_ray.cluster", reason="needs the package ray")
    with pytest.raises(UsageError, match="not the address of a cluster"):
        cluster._check_address(address)


def test_where_no_cluster_answers() -> None:
    cluster = pytest.importorskip("tokmill_ray.cluster", reason="needs the package ray")
    with pytest.raises(MachineError, match="no Ray cluster answers at 127.0.0.1:1 ") as caught:
        cluster._check_address("127.0.0.1:1")
    assert "ray start --head" in caught.value.hint


def test_what_keeps_a_machine_from_working_for_a_build(tmp_path: Path) -> None:
    cluster = pytest.importorskip("tokmill_ray.cluster", reason="needs the package ray")
    proof = tmp_path / "store" / "proof"
    shared = cluster.Shared(str(proof), "content", [str(tmp_path)], __version__)
    assert f"does not see the folder {proof.parent} (No such" in cluster.problem_here(shared)
    proof.parent.mkdir()
    proof.write_text("of another build")
    assert cluster.problem_here(shared) == f"sees another folder {proof.parent}"
    proof.write_text("content")
    assert cluster.problem_here(shared) == ""
    assert [path.name for path in proof.parent.iterdir()] == ["proof"]
    found = cluster.problem_here(shared._replace(inputs=[str(tmp_path), "/no/input"]))
    assert found == "does not see the input /no/input"
    found = cluster.problem_here(shared._replace(version="9"))
    assert found == f"has tokmill {__version__}, not 9"
    if os.geteuid():
        proof.parent.chmod(0o500)
        assert "cannot write to the folder" in cluster.problem_here(shared)
        proof.parent.chmod(0o700)
