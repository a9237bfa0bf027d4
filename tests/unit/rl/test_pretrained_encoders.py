"""A policy's encoder from a run that predicted hidden fields on a store of `build mlir`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
from making import quick_build
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.modules import generators, problem
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.models.transformers.transformer import EncoderConfig
from tokmill.rl.embedding import embeddings, pretrained
from tokmill.rl.embedding.distilbert import DistilBert
from tokmill.training.runs.run import load_task

LINE = "matmul 16 32 16, relu"
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "a.mlir").write_text(generators.chain(LINE))
    quick_build("mlir", folder / "a.mlir", folder / "store", schedules=3)
    given: dict[str, Any] = {
        "data": {"train": str(folder / "store"), "batch": 4},
        "model": {"kind": "encoder", "dim": 32, "layers": 2, "heads": 4, "hidden": 48,
                  "context": 128},
        "task": {"kind": "masked", "rows": "whole", "length": 128, "columns": ["token"]},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "seed": 7},
    }  # fmt: skip
    torch.set_num_threads(1)
    return tokmill.train(given, folder / "run", quiet=True).path


def shown(**config: Any) -> tuple[DistilBert, dict[str, torch.Tensor]]:
    """Return an embedding, and the observations of a module."""
    torch.manual_seed(1)
    one = problem.of_line(LINE)
    table = {"distilbert": SMALL | config}
    view = views.make(embeddings.view_of("distilbert", table), Sizes.of(one.operations), [one])
    embedding = embeddings.make("distilbert", view.spaces(), table)
    assert isinstance(embedding, DistilBert)
    seen = [view(legal.begin(each), views.producer_of(one, each)) for each in one.operations]
    return embedding, embeddings.batch(seen)


def test_states_are_those_of_the_run(run: Path) -> None:
    """What the policy sees of an operation, it computes as the run's model does of its record."""
    embedding, given = shown()
    assert pretrained.take_encoder(embedding, run) == []
    store = tokmill.Store(run.parent / "store")
    model = load_task(run).model
    embedding.eval()
    compared = 0
    for number in range(store.records):
        record = store.record(number)
        for row in range(2):
            length = int(given["mask"][row].sum())
            same = np.array_equal(record["token"], given["ids"][row, :length].numpy())
            if record["schedule"] or not same:
                continue
            columns = {
                name: torch.from_numpy(record[name].astype(np.int64))[None]
                for name in ("token", "segment", "depth")
            }
            tensors = embedding.tensors({name: value[[row]] for name, value in given.items()})
            for name, column in columns.items():
                assert torch.equal(tensors.columns[name], column)
            with torch.no_grad():
                theirs = model(tensors)[0, 0]
                mine = embedding(given)[row, : model.dim]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared == 2


def test_a_longer_table_of_positions_keeps_its_rows(run: Path) -> None:
    """The policy's table has 512 rows, the run's 128: the first 128 are the run's."""
    embedding, _ = shown()
    before = embedding.encoder.state_dict()["positions.weight"].clone()
    pretrained.take_encoder(embedding, run)
    after = embedding.encoder.state_dict()["positions.weight"]
    assert (after[128:] == before[128:]).all()
    assert (after[:128] != before[:128]).any()


def test_what_does_not_fit_is_refused(run: Path, tmp_path: Path) -> None:
    for config, said in (
        ({"hidden_size": 64}, "hidden_size = 32"),
        ({"num_attention_heads": 2}, "num_attention_heads = 4"),
        ({"num_hidden_layers": 1}, "num_hidden_layers = 2"),
    ):
        embedding, _ = shown(**config)
        with pytest.raises(TokmillError, match="the encoder differs") as caught:
            pretrained.take_encoder(embedding, run)
        assert said in caught.value.hint
    embedding, _ = shown(tokens="buckets")
    with pytest.raises(UsageError, match="only a distilbert"):
        pretrained.take_encoder(embedding, run)
    embedding, _ = shown()
    with pytest.raises(TokmillError) as caught:
        pretrained.take_encoder(embedding, tmp_path)
    assert caught.value.hint


def test_other_tokens_are_refused(run: Path, tmp_path: Path) -> None:
    """A list of tokens in another order has the same size, and another meaning."""
    other = tmp_path / "run"
    shutil.copytree(run, other)
    file = other / "vocab" / "token.json"
    found = json.loads(file.read_text())
    found["tokens"][10:12] = reversed(found["tokens"][10:12])
    file.write_text(json.dumps(found))
    embedding, _ = shown()
    with pytest.raises(TokmillError, match="not those of the fields"):
        pretrained.take_encoder(embedding, other)
    file.write_text("[")
    with pytest.raises(TokmillError, match="cannot be read"):
        pretrained.take_encoder(embedding, other)


def test_the_recipes_have_equal_encoders() -> None:
    """`tokmill rl train schedules-distilbert --from RUN` takes what mlir-fields trains."""
    before = recipe.read_toml("mlir-fields")
    after = recipe.read_toml("schedules-distilbert")["model"]["model_config"]["distilbert"]
    del before["model"]["kind"]
    embedding, _ = shown(intermediate_size=0, **after)
    theirs = EncoderConfig(**before["model"])
    pretrained.check_config(theirs, embedding.encoder.config, Path("RUN"))
