"""Which ids follow a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokmill.errors import UsageError
from tokmill.inference.sample import Carried, continue_columns, draw
from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.models.model import Model, Recurrent, Tensors
from tokmill.models.rwkv7 import RWKV7, RWKV7Config
from tokmill.tasks.next_token import NextToken, NextTokenConfig

SHARES = torch.tensor([0.15, 0.5, 0.05, 0.3])


def task_of(length: int, **keys: Any) -> NextToken:
    torch.manual_seed(1)
    model = Decoder(DecoderConfig(dim=16, layers=1, heads=2, **keys), {"token": 20})
    task = NextToken(NextTokenConfig(length=length), model, {"token": 20})
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return task


def follow(
    task: NextToken, ids: list[int], tokens: int, size: int | None = None, **keys: Any
) -> list[int]:
    """What follows ids of the one column."""
    sizes, stops = {task.column: size}, {task.column: None}
    return continue_columns(task, {task.column: ids}, tokens, sizes=sizes, stops=stops, **keys)[
        task.column
    ]


@pytest.mark.parametrize(
    ("top_k", "top_p", "drawn"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (0, 0.4, {1}),
        (0, 0.6, {1, 3}),
        (0, 0.9, {0, 1, 3}),
        # Of the best two 0.5 is 5/8.
        (2, 0.6, {1}),
        (2, 0.7, {1, 3}),
    ],
)
def test_what_can_be_drawn(top_k: int, top_p: float, drawn: set[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = SHARES.log()
    assert {draw(logits, 1.0, top_k, top_p, generator) for _ in range(300)} == drawn


def test_the_likeliest_needs_no_draw() -> None:
    assert draw(SHARES.log(), 0, 0, 1.0, torch.Generator()) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_id_are_never_drawn(temperature: float) -> None:
    task = task_of(8)
    keys: dict[str, Any] = {"temperature": temperature, "top_k": 0, "seed": 3}
    assert max(follow(task, [1, 2], 40, **keys)) >= 12
    assert max(follow(task, [1, 2], 40, size=12, **keys)) < 12


@pytest.mark.parametrize("keys", [{}, {"position": "learned", "context": 6, "norm": "layer"}])
def test_the_model_sees_the_last_positions(keys: dict[str, Any]) -> None:
    task = task_of(6, **keys)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    made = follow(task, ids, 12, temperature=0)
    assert made == follow(task, ids[-6:], 12, temperature=0) and len(made) == 12
    # One id less is another view.
    logits = [task.logits(hidden_of(task, ids[-n:])) for n in (6, 5)]
    assert not torch.allclose(logits[0], logits[1])


def hidden_of(task: NextToken, ids: list[int]) -> torch.Tensor:
    seen = torch.tensor([ids])
    place = torch.arange(len(ids))[None]
    return task.model(Tensors({"token": seen}, torch.zeros_like(seen), place, whole=True))[:, -1]


@pytest.mark.parametrize(
    "keys", [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}, {"top_k": -1}]
)
def test_options_out_of_range(keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        follow(task_of(4), [1], 1, **keys)
    assert error.value.hint


def test_each_column_is_drawn_by_its_head() -> None:
    torch.manual_seed(1)
    sizes = {"asm": 20, "mne": 7}
    model = Decoder(DecoderConfig(dim=16, layers=1, heads=2), sizes)
    task = NextToken(NextTokenConfig(length=4), model, sizes)
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = {"asm": [3, 1, 4, 1, 5], "mne": [1, 2, 3, 4, 5]}
    keys: dict[str, Any] = {"temperature": 0, "sizes": sizes, "stops": dict.fromkeys(sizes)}
    made = continue_columns(task, ids, 6, **keys)
    assert {name: len(values) for name, values in made.items()} == {"asm": 6, "mne": 6}
    seen = {name: torch.tensor([values[-4:]]) for name, values in ids.items()}
    none = torch.zeros((1, 4), dtype=torch.long)
    hidden = task.model(Tensors(seen, none, torch.arange(4)[None], whole=True))[:, -1]
    for name, values in made.items():
        assert values[0] == int(task.logits(hidden, name).argmax())
    # What the other column says changes what follows.
    other = continue_columns(task, ids | {"mne": [6, 6, 6, 6, 0]}, 6, **keys)
    assert other["asm"] != made["asm"]
    stopped = continue_columns(
        task, ids, 6, **keys | {"stops": {"asm": None, "mne": made["mne"][2]}}
    )
    first = made["mne"].index(made["mne"][2])
    assert stopped == {name: values[:first] for name, values in made.items()}


class Stateless(Model):
    """A recurrent model that reads all from the beginning each time."""

    def __init__(self, model: RWKV7) -> None:
        super().__init__()
        self.inner, self.dim = model, model.dim

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.inner(batch)

    def embedding(self, column: str) -> torch.nn.Parameter:
        return self.inner.embedding(column)


@pytest.mark.parametrize("prompt", [1, 5, 40])
@pytest.mark.parametrize("keys", [{"temperature": 0}, {"temperature": 1.0, "top_k": 9, "seed": 4}])
def test_a_state_stands_for_all_that_was_read(prompt: int, keys: dict[str, Any]) -> None:
    """Of a prompt longer than the rows of the training, nothing is cut off."""
    torch.manual_seed(2)
    sizes = {"asm": 20, "mne": 7}
    model = RWKV7(RWKV7Config(dim=16, layers=2, head_dim=8), sizes)
    task = NextToken(NextTokenConfig(length=6, tied=False), model, sizes)
    other = NextToken(NextTokenConfig(length=99), Stateless(model), sizes)
    other.heads = task.heads
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    assert isinstance(task.model, Recurrent) and not isinstance(other.model, Recurrent)
    ids = {name: [(7 * n) % size for n in range(prompt)] for name, size in sizes.items()}
    keys = {**keys, "sizes": sizes, "stops": dict.fromkeys(sizes)}
    made = continue_columns(task, ids, 30, **keys)
    assert made == continue_columns(other, ids, 30, **keys)
    assert len(set(made["asm"])) > 3
    if prompt > 6:
        # The first id of the prompt is still felt.
        changed = {name: [values[0] + 1, *values[1:]] for name, values in ids.items()}
        left, right = (reading(task, columns) for columns in (ids, changed))
        assert not torch.equal(left, right)


def reading(task: NextToken, ids: dict[str, list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return Carried(task)({name: torch.tensor([values]) for name, values in ids.items()})
