"""torch.compile: the same training, the same names; and a clear word where it cannot work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import tokmill
from tokmill.base.errors import MachineError, TokmillError
from tokmill.models.model import Tensors
from tokmill.training.engines.single import any_number_of_documents, compile_errors
from toy import cycles, losses, make_store, recipe, weights

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(60))


def test_without_a_compiler_the_error_says_what_to_do(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError, match="no 'no-such-compiler'") as caught:
        tokmill.train(recipe(store, 2, run={"compile": True}), tmp_path / "run", quiet=True)
    assert "CXX" in caught.value.hint and "run.compile=false" in caught.value.hint
    assert not (tmp_path / "run/recipe.json").exists()


def test_a_failure_inside_torch_is_no_traceback() -> None:
    from torch._dynamo.exc import TorchDynamoException

    said = r"torch\.compile failed: g\+\+ said no"
    with pytest.raises(TokmillError, match=said) as caught, compile_errors():
        raise TorchDynamoException("g++ said no\nand much more")
    assert "run.compile=false" in caught.value.hint


def test_the_number_of_documents_makes_no_new_program() -> None:
    made: list[object] = []

    def backend(program: object, inputs: object) -> object:
        made.append(program)
        return program

    torch._dynamo.reset()
    sums = torch.compile(lambda batch: batch.cu_seqlens.sum(), dynamic=False, backend=backend)
    place = torch.zeros(2, 8, dtype=torch.int64)
    for marked in (True, False):
        for documents in range(3, 7):
            ends = torch.arange(documents, dtype=torch.int32)
            batch = Tensors({}, place, place, whole=False, cu_seqlens=ends)
            if marked:
                any_number_of_documents(batch)
            assert sums(batch) == ends.sum()
        assert len(made) == (1 if marked else 5)
        torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None, reason="needs a C++ compiler"
)
# torch itself warns, about itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_learns_the_same(store: Path, tmp_path: Path) -> None:
    # Three micro-batches of two shapes, and another one in evaluation.
    options = {"data": {"val": str(store)}, "run": {"micro_tokens": 48, "eval_rows": 5}}
    for name in (False, True):
        options["run"]["compile"] = name
        tokmill.train(recipe(store, 6, **options), tmp_path / str(name), quiet=True)
    for metric in ("loss", "grad_norm", "val_loss"):
        plain, compiled = (losses(tmp_path / str(name), metric) for name in (False, True))
        assert compiled == pytest.approx(plain, abs=1e-5), metric
    # Names are those of the model, not of what is wrapped around it.
    assert weights(tmp_path / "True").keys() == weights(tmp_path / "False").keys()
