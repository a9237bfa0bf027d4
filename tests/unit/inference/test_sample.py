"""Which ids follow a prompt."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.recipe import convert
from tokmill.inference.drawing import Drawing
from tokmill.inference.sample import Row, choose, continue_rows
from tokmill.inference.vectors import Carried, reading, window
from tokmill.models.model import Inputs, Model, Recurrent, Tensors
from tokmill.models.rwkv.rwkv7 import RWKV7, RWKV7Config
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig

SHARES = torch.tensor([0.15, 0.5, 0.05, 0.3])
SIZES = {"asm": 20, "mne": 7}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    # kind, keys, columns
    "llama": ("decoder", {"heads": 4, "kv_heads": 2}, 1),
    "gpt2": ("decoder", {"position": "learned", "context": 12, "norm": "layer"}, 1),
    "two columns": ("decoder", {"join": "concat", "field_dim": 8}, 2),
    "rwkv7": ("rwkv7", {"head_dim": 8}, 1),
    "rwkv7, two columns": ("rwkv7", {"head_dim": 8, "join": "concat", "field_dim": 8}, 2),
}
GREEDY = Drawing(temperature=0)
DRAWN = Drawing(temperature=1.5, top_k=9, top_p=0.95, seed=4)


class Plain(Model):
    """A model that keeps nothing: it reads all again each time."""

    causal = True

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner, self.dim = model, model.dim

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.inner(batch)

    def embedding(self, column: str) -> torch.nn.Parameter:
        return self.inner.embedding(column)


def task_of(name: str = "llama", length: int = 12, **more: Any) -> NextToken:
    kind, keys, columns = MODELS[name]
    torch.manual_seed(1)
    sizes = dict(list(SIZES.items())[:columns])
    model: Model
    if kind == "decoder":
        model = Decoder(
            DecoderConfig(**{"dim": 16, "layers": 2, "heads": 2} | keys | more), Inputs(sizes)
        )
    else:
        model = RWKV7(RWKV7Config(**{"dim": 16, "layers": 2} | keys), Inputs(sizes))
    tied = keys.get("join") != "concat"
    task = NextToken(NextTokenConfig(length=length, tied=tied), model, Inputs(sizes))
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return task.eval()


def plain(task: NextToken) -> NextToken:
    """The same weights without a cache or a state; what has a state sees all of a row."""
    length = 999 if isinstance(task.model, Recurrent) else window(task)
    other = NextToken(
        NextTokenConfig(length=length, tied=task.config.tied), Plain(task.model), Inputs(task.sizes)
    )
    other.heads = task.heads
    return other.eval()


def prompts(task: NextToken, lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    source = np.random.default_rng(5)
    return [
        {name: source.integers(0, size, n).tolist() for name, size in task.sizes.items()}
        for n in lengths
    ]


def follow(
    task: NextToken,
    given: Sequence[Mapping[str, Sequence[int]]],
    tokens: int,
    how: Drawing = GREEDY,
    samples: int = 1,
    **keys: Any,
) -> list[Row]:
    rows = [Row(n, sample, ids) for n, ids in enumerate(given) for sample in range(samples)]
    none, no_end = dict.fromkeys(task.sizes), dict.fromkeys(task.sizes, ())
    continue_rows(task, rows, tokens, how, **{"sizes": none, "ends": no_end} | keys)
    return rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_what_is_kept_is_what_would_be_computed(name: str, how: Drawing) -> None:
    """Prompts of many lengths, some longer than the window, which others outgrow on the way."""
    task = task_of(name)
    given = prompts(task, [1, 5, 40, 12, 3, 3, 11, 13])
    made = follow(task, given, 20, how)
    for row, other in zip(made, follow(plain(task), given, 20, how), strict=True):
        assert row.new_ids == other.new_ids, row.prompt
        assert len(set(row.new_ids["asm"])) > 2
    sees_all = isinstance(task.model, Recurrent)
    assert [row.out_of_sight > 0 for row in made] == [not sees_all] * len(made)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_row_is_the_same_in_any_company(name: str, how: Drawing) -> None:
    task = task_of(name)
    given = prompts(task, [7, 2, 16, 2, 9])
    together = follow(task, given, 15, how, samples=2)
    for row in together:
        alone = Row(row.prompt, row.sample, row.ids)
        none, no_end = dict.fromkeys(task.sizes), dict.fromkeys(task.sizes, ())
        continue_rows(task, [alone], 15, how, sizes=none, ends=no_end)
        assert alone.new_ids == row.new_ids, (row.prompt, row.sample)
    pairs = [(a.new_ids, b.new_ids) for a, b in zip(together[::2], together[1::2], strict=True)]
    assert all(one == other for one, other in pairs) == (how is GREEDY)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    tokens=st.integers(1, 14),
    size=st.integers(1, 16),
    end=st.none() | st.integers(0, 19),
    name=st.sampled_from(["llama", "rwkv7"]),
)
def test_any_lengths(
    lengths: list[int], tokens: int, size: int, end: int | None, name: str
) -> None:
    task = task_of(name, length=size)
    given = prompts(task, lengths)
    made = follow(task, given, tokens, DRAWN, ends={"asm": [end]})
    expected = follow(plain(task), given, tokens, DRAWN, ends={"asm": [end]})
    for row, other in zip(made, expected, strict=True):
        assert (row.new_ids, row.end) == (other.new_ids, other.end)
        assert row.end == "eot" or len(row.new_ids["asm"]) == tokens
        if name == "llama":
            before = row.length + len(row.new_ids["asm"]) - (row.end != "eot")
            assert row.out_of_sight == max(0, before - size)


def test_ids_are_read_once() -> None:
    """A step has as many positions as rows; a slid window has all of its own."""
    task, read = task_of(length=8), []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        read.append(tuple(output.shape[:2]))

    task.model.fields.register_forward_hook(note)
    follow(task, prompts(task, [6, 4]), 6)
    # Rows of 6 and 4 ids grow to 11 and 9; the window is 8.
    assert read == [(2, 6), (2, 1), (2, 1), (1, 8), (1, 1), (1, 8), (1, 1), (2, 8)]


@pytest.mark.parametrize("prompt", [1, 5, 40])
def test_a_state_stands_for_all_that_was_read(prompt: int) -> None:
    """Of a prompt longer than the rows of the training, nothing is cut off."""
    task = task_of("rwkv7, two columns", length=6)
    (ids,) = prompts(task, [prompt])
    changed = {name: [(values[0] + 1) % SIZES[name], *values[1:]] for name, values in ids.items()}
    with torch.no_grad():
        left, right = (Carried(task).begin([one]) for one in (ids, changed))
    assert not torch.equal(left, right)


@pytest.mark.parametrize(
    ("how", "drawn"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.9}, {0, 1, 3}),
        # Of the best two 0.5 is 5/8.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 2, "top_p": 0.7}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"temperature": 1e-320}, {1}),
        ({"temperature": 5e-324, "top_k": 3}, {1}),
        ({"temperature": 1e-3}, {1}),
        ({"temperature": 1e300}, {0, 1, 2, 3}),
    ],
)
def test_what_can_be_drawn(how: dict[str, Any], drawn: set[int]) -> None:
    drawing = Drawing(**{"temperature": 1.0, "top_k": 0} | how)
    rows = 400
    numbers = [drawing.numbers(row, 0) for row in range(rows)]
    found = choose(SHARES.log().expand(rows, -1), drawing, numbers)
    assert set(found.tolist()) == drawn


def test_shares_are_those_of_the_softmax() -> None:
    drawing, rows = Drawing(temperature=1.0, top_k=0), 20_000
    numbers = [drawing.numbers(row, 1) for row in range(rows)]
    counts = choose(SHARES.log().expand(rows, -1), drawing, numbers).bincount()
    assert (counts / rows - SHARES).abs().max() < 0.015


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("top_p", [0.999999, 1.0])
def test_of_equal_ids_the_lowest_k_are_drawn(k: int, top_p: float) -> None:
    """All logits are equal but for one that is higher, and one that is lower."""
    logits = torch.zeros(8)
    logits[6], logits[0] = 1.0, -1.0
    drawing = Drawing(temperature=1.0, top_k=k, top_p=top_p)
    rows = 300
    numbers = [drawing.numbers(row, 0) for row in range(rows)]
    found = set(choose(logits.expand(rows, -1), drawing, numbers).tolist())
    assert found == {6, *range(1, k)}
    assert choose(torch.zeros(2, 9), GREEDY, []).tolist() == [0, 0]


@pytest.mark.parametrize("how", [GREEDY, Drawing(temperature=1.0, top_k=0, seed=3)])
def test_rows_without_an_id_are_never_drawn(how: Drawing) -> None:
    task = task_of()
    given = [{"asm": [1, 2]}, {"asm": list(range(9))}]
    assert max(n for row in follow(task, given, 40, how) for n in row.new_ids["asm"]) >= 12
    made = follow(task, given, 40, how, sizes={"asm": 12})
    assert max(n for row in made for n in row.new_ids["asm"]) < 12


@pytest.mark.parametrize("keys", [{}, {"position": "learned", "context": 6, "norm": "layer"}])
def test_the_model_sees_the_last_positions(keys: dict[str, Any]) -> None:
    task = task_of(length=6, **keys)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    whole, cut = follow(task, [{"asm": ids}], 12), follow(task, [{"asm": ids[-6:]}], 12)
    assert whole[0].new_ids == cut[0].new_ids and len(whole[0].new_ids["asm"]) == 12
    assert whole[0].out_of_sight == cut[0].out_of_sight + 5 == 16
    with torch.no_grad():
        six, five = (reading(task).begin([{"asm": ids[-n:]}]) for n in (6, 5))
    assert not torch.allclose(six, five)


def test_a_table_shorter_than_the_rows_is_the_window() -> None:
    task = task_of("gpt2", length=99)
    assert window(task) == 12
    assert follow(task, prompts(task, [20]), 3)[0].out_of_sight == 10


def test_each_column_is_drawn_by_its_head() -> None:
    task = task_of("two columns", length=4)
    (ids,) = prompts(task, [5])
    (row,) = follow(task, [ids], 6)
    with torch.no_grad():
        hidden = reading(task).begin([ids])
    for name, values in row.new_ids.items():
        assert len(values) == 6 and values[0] == int(task.logits(hidden, name).argmax())
    # What the other column says changes what follows.
    (other,) = follow(task, [ids | {"mne": [6, 6, 6, 6, 0]}], 6)
    assert other.new_ids["asm"] != row.new_ids["asm"]
    (stopped,) = follow(task, [ids], 6, ends={"asm": [], "mne": [row.new_ids["mne"][2]]})
    first = row.new_ids["mne"].index(row.new_ids["mne"][2])
    assert stopped.new_ids == {name: values[:first] for name, values in row.new_ids.items()}
    assert stopped.end == "eot"


NUMBERS = st.sampled_from([
    0, 1, 2, -1, 50, 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e-6, 1e300, math.inf,
    -math.inf, math.nan, True, 10**400, -(10**400),
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(Drawing.__struct_fields__, NUMBERS)))
def test_any_options_are_refused_or_right(values: dict[str, Any]) -> None:
    try:
        how = convert(Drawing, values)
    except UsageError as error:
        assert error.hint
        return
    assert math.isfinite(how.temperature) and how.temperature >= 0
    numbers = [how.numbers(row, 0) for row in range(3)]
    found = choose(SHARES.log().expand(3, -1), how, numbers)
    assert all(0 <= number < 4 for number in found.tolist())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_told(wrong: float) -> None:
    task = task_of()
    with torch.no_grad():
        task.model.embedding("asm")[3] = wrong
    for how in (GREEDY, DRAWN):
        with pytest.raises(TokmillError, match="not numbers") as error:
            follow(task, [{"asm": [1, 2]}], 3, how)
        assert "--at best" in error.value.hint


def test_top_p_of_equal_shares_takes_exactly_as_many_as_it_says() -> None:
    """n equal shares and p = k / n: k ids, though k sums of 1 / n are not k / n in binary."""
    for count in (3, 7, 10, 12, 49):
        logits = torch.zeros(2_000, count)
        for k in range(1, count):
            how = Drawing(top_k=0, top_p=k / count, temperature=1, seed=k)
            numbers = [how.numbers(0, row) for row in range(len(logits))]
            found = choose(logits, how, numbers)
            assert sorted(set(found.tolist())) == [*range(k)], (count, k)
            if count > 10 and k > 3:
                break
