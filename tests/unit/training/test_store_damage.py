"""Training and evaluation on a store of which a token has changed into another one."""

import shutil
from pathlib import Path

import pytest

import tokmill
from tokmill.base.errors import TokmillError
from tokmill.store.store import Store
from tokmill.training.evaluate import evaluate
from toy import recipe


@pytest.fixture
def damaged(store: Path, tmp_path: Path) -> Path:
    """A store of which one token has changed, all ids being in range."""
    shutil.copytree(store, tmp_path / "store")
    (path,) = (tmp_path / "store/shards").glob("*.safetensors")
    tokens = Store(store).shard(0)["token"]
    data = bytearray(path.read_bytes())
    place = data.index(tokens.tobytes()) + 3 * tokens.itemsize
    data[place] = data[place] % 22 + 1
    path.write_bytes(data)
    return tmp_path / "store"


def test_a_training_ends_with_an_error(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="sha256 differs") as found:
        tokmill.train(recipe(damaged, 3), tmp_path / "run", quiet=True)
    assert "`tokmill build` makes it again" in found.value.hint
    assert not (tmp_path / "run/model").exists()
    plain = recipe(damaged, 3, data={"verify": False})
    assert tokmill.train(plain, tmp_path / "off", quiet=True).step == 3


def test_an_evaluation_too(damaged: Path, store: Path, tmp_path: Path) -> None:
    run = tokmill.train(recipe(store, 3), tmp_path / "run", quiet=True).path
    with pytest.raises(TokmillError, match="sha256 differs"):
        evaluate(run, damaged, device="cpu")
    assert evaluate(run, store, device="cpu")["targets"] > 0
