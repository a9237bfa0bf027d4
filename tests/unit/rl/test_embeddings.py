"""Embeddings: one interface, rows of their own, and weights that all learn."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import made_times
from made_device import DEVICE, computed_there
from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import problem
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.models.model import Inputs
from tokmill.rl.embedding import embeddings
from tokmill.rl.policy import PolicyConfig
from tokmill.training.engines.devices.device import moved
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import make_task

LINES = ["matmul 64 32 16", "conv_2d_nchw 1 3 11 4 3 2, relu", "add 8 8", "softmax 16 32"]
BUCKETS = {"distilbert": {"tokens": "buckets"}}
KINDS: list[tuple[str, dict[str, Any]]] = [
    *[(kind, {}) for kind in plugins.EMBEDDINGS],
    ("distilbert", BUCKETS),
]


def shown(model_type: str, config: dict[str, Any], lines: list[str] | None = None) -> Any:
    """Return the spaces of an environment, and observations of all its operations."""
    problems = [problem.of_line(line) for line in lines or LINES]
    sizes = Sizes.of((each for one in problems for each in one.operations), normalize="log2")
    view = views.make(embeddings.view_of(model_type, config), sizes, problems)
    found = []
    for one in problems:
        for each in one.operations:
            state = legal.begin(each)
            producer = views.producer_of(one, each)
            found.append(view(state, producer))
            if len(each.bounds) == 3:
                state = legal.take(state, actions.Tile(each.tag, (4, 8, 0)))
                state = legal.take(state, actions.Interchange(each.tag, (2, 0, 1)))
                found.append(view(state, producer))
    return view.spaces(), found


def made(model_type: str, config: dict[str, Any]) -> tuple[embeddings.Embedding, list[Any]]:
    """Return an embedding and observations."""
    torch.manual_seed(0)
    spaces, found = shown(model_type, config)
    return embeddings.make(model_type, spaces, config), found


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_one_interface(kind: str, config: dict[str, Any]) -> None:
    """Switching the model is one word: what comes out has `output_size` numbers a row."""
    embedding, found = made(kind, config)
    out = embedding(embeddings.batch(found))
    assert out.shape == (len(found), embedding.output_size)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()
    history = found[-1]["history"]
    # The history stands beside, as in the original.
    assert (out[-1, -len(history) :].detach().numpy() == history).all()
    # Other operations have other vectors.
    apart = torch.cdist(out.double(), out.double()) + torch.eye(len(found)) * 9
    assert apart.min() > 1e-3


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_a_row_is_its_own(kind: str, config: dict[str, Any]) -> None:
    """Neither other rows nor padding change a vector."""
    embedding, found = made(kind, config)
    embedding.eval()
    together = embedding(embeddings.batch(found))
    for row, one in enumerate(found):
        alone = embedding(embeddings.batch([one]))[0]
        torch.testing.assert_close(alone, together[row], rtol=1e-4, atol=1e-5)
    if "mask" in found[0]:
        longer = [
            {
                name: np.concatenate((array, np.full(40, 2 if name == "ids" else 0)))
                if name != "history"
                else array
                for name, array in one.items()
            }
            for one in found
        ]
        again = embedding(embeddings.batch(longer))
        torch.testing.assert_close(again, together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_all_weights_learn(kind: str, config: dict[str, Any]) -> None:
    """Each tensor has a gradient, and of tables each row that was read, `[CLS]` among them."""
    embedding, found = made(kind, config)
    given = embeddings.batch(found)
    out = embedding(given)
    (out * torch.randn_like(out)).sum().backward()
    for name, weight in embedding.named_parameters():
        assert weight.grad is not None, name
        # Adding a constant to all keys changes no attention.
        if not name.endswith("attention.k.bias"):
            assert weight.grad.abs().sum() > 0, name
    tables = {
        "distilbert": "encoder.fields.embeddings.column_token.weight",
        "loop_transformer": "tokens.weight",
    }
    if kind in tables:
        grad = embedding.get_parameter(tables[kind]).grad
        assert grad is not None
        read = given["ids"][given["mask"] == 1].unique()
        assert 0 in read
        assert (grad[read].abs().sum(dim=1) > 0).all()
        assert (grad[2] == 0).all()  # [PAD]


def test_batches_of_actions_are_told_apart() -> None:
    """The sum over a loop's tokens keeps the order of actions, of loops and of operands."""
    (matmul,) = problem.of_line("matmul 64 64 64").operations
    spaces, _ = shown("loop_transformer", {})
    embedding = embeddings.make("loop_transformer", spaces)
    one = problem.of_line("matmul 64 64 64")
    view = views.make("fields", Sizes.of(one.operations), [one])
    schedules = [
        [(8, 0, 0), (2, 0, 0)], [(8, 0, 0)], [(0, 8, 0)], [(2, 0, 0)], "021", "102", "120", "201",
    ]  # fmt: skip
    found = []
    for schedule in schedules:
        state = legal.begin(matmul)
        if isinstance(schedule, str):
            order = tuple(map(int, schedule))
            state = legal.take(state, actions.Interchange("op_0", order))
        else:
            for sizes in schedule:
                state = legal.take(state, actions.Tile("op_0", sizes))
        found.append(view(state, None))
    given = embeddings.batch(found)
    given["history"] = torch.zeros(len(found), spaces["history"].shape[0])
    out = embedding(given)
    assert (torch.cdist(out, out) + torch.eye(len(found)) * 9).min() > 1e-2


@pytest.mark.parametrize("kind", plugins.EMBEDDINGS)
def test_a_dropout_that_does_nothing_is_said(kind: str) -> None:
    for share in (0.0, 0.25):
        config = {kind: {"dropout": share}}
        notes = PolicyConfig(model_type=kind, model_config=config).notes()
        assert sum("dropout = 0.25 has no effect" in note for note in notes) == (share > 0)
    # That of another model_type is not used at all.
    other = next(one for one in plugins.EMBEDDINGS if one != kind)
    assert not PolicyConfig(model_type=other, model_config=config).notes()


@pytest.mark.parametrize("key", ["hidden", "depth", "loops", "accesses", "dimensions"])
def test_sizes_of_a_policy_have_limits(key: str) -> None:
    """Before arrays are made of them, whose number is a product of these."""
    for value in (-1, 0, 100_000, 1 << 62):
        with pytest.raises(UsageError, match=f"model.{key}: {value} is not from 1 to") as caught:
            PolicyConfig(**{key: value})  # type: ignore[arg-type]
        assert caught.value.hint


def test_layers_of_a_policy_have_a_limit_together() -> None:
    with pytest.raises(UsageError, match="weights") as caught:
        PolicyConfig(hidden=1 << 14, depth=256).notes()
    assert caught.value.where == "model.hidden, model.depth" and caught.value.hint


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("distillbert", {}, "no embedding is called 'distillbert'"),
        ("lstm", {"bert": {}}, "no embedding is called 'bert'"),
        ("lstm", {"lstm": {"hidden": 3}}, "hidden"),
        ("lstm", {"distilbert": {"layers": 3}}, "layers"),
        ("lstm", {"lstm": 3}, "not a table"),
        ("lstm", {"lstm": {"lstm_size": 0}}, "at least 1|too small"),
        ("lstm", {"lstm": {"dropout": float("nan")}}, "cannot be dropped"),
        ("distilbert", {"distilbert": {"num_attention_heads": 5}}, "do not divide"),
        ("distilbert", {"distilbert": {"num_attention_heads": 0}}, "too small"),
        ("distilbert", {"distilbert": {"hidden_size": -128}}, "too small"),
        ("distilbert", {"distilbert": {"tokens": "words"}}, "'words' is not known"),
        ("distilbert", {"distilbert": {"max_seq_length": 20}}, "can have"),
        ("distilbert", {"distilbert": {"max_seq_length": -1, "truncate": True}}, "= -1"),
        ("distilbert", {"distilbert": {"max_seq_length": 1 << 40}}, "max_seq_length"),
        ("distilbert", {"distilbert": {"vocab_size": 1 << 40}}, "vocab_size"),
        ("distilbert", {"distilbert": {"hidden_size": 1 << 40}}, "too large"),
        ("distilbert", {"distilbert": {"num_hidden_layers": 1 << 40}}, "too large"),
        ("lstm", {"lstm": {"hidden_size": 1 << 14, "lstm_size": 1 << 14}}, "weights"),
        ("loop_transformer", {"loop_transformer": {"num_hidden_layers": 0}}, "too small"),
    ],
)
def test_what_is_wrong_is_said(kind: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        spaces, _ = shown(kind, config)
        embeddings.make(kind, spaces, config)
    assert caught.value.hint


def test_another_view_is_refused() -> None:
    spaces, _ = shown("lstm", {})
    with pytest.raises(UsageError, match="reads the view 'fields'"):
        embeddings.make("distilbert", spaces)


@pytest.mark.parametrize("kind", plugins.EMBEDDINGS)
def test_a_policy_and_its_loss_are_computed_on_one_device(kind: str) -> None:
    """The task as the engine runs it: it moves all of a batch, and the loss is where it is."""
    config = from_dict(made_times.recipe(Path("cache"), kind))
    task = make_task(config, Inputs(made={"operation": 1}))
    batch = task.example(3)
    parts = {
        (part, name): one
        for part in ("values", "targets")
        for name, one in getattr(batch, part).items()
    }

    def compute(given: Mapping[Any, torch.Tensor]) -> Any:
        tensors = {part: {n: one for (p, n), one in given.items() if p == part}
                   for part in ("values", "targets")}  # fmt: skip
        return task(dataclasses.replace(batch, **tensors))

    loss, sums = computed_there(task, parts, compute)
    assert loss.device == DEVICE and {one.device for one in sums.values()} == {DEVICE}
    there = moved(batch, torch.device("meta"))
    for part in ("values", "targets"):
        assert {one.device.type for one in getattr(there, part).values()} == {"meta"}


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_half_precision(kind: str, config: dict[str, Any]) -> None:
    """Under autocast the vectors are near those of whole precision."""
    embedding, found = made(kind, config)
    given = embeddings.batch(found)
    whole = embedding(given)
    with torch.autocast("cpu", torch.bfloat16):
        out = embedding(given)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float(), whole, rtol=0.1, atol=0.1)
