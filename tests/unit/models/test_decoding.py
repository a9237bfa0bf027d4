"""Reading on with kept keys and values is reading all again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers import layers
from tokmill.models.transformers.attention import RopeScaling
from tokmill.models.transformers.transformer import SLOTS, Decoder, DecoderConfig, Decoding

STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped": {"kv_heads": 2},
    "one group": {"kv_heads": 1, "head_dim": 6, "rope_theta": 500.0},
    "llama 3": {"rope_scaling": RopeScaling(factor=4.0, original_context=16)},
    "gpt2": {
        "position": "learned", "context": 200, "norm": "layer", "activation": "gelu_tanh",
        "bias": True,
    },
    "rope with biases": {"bias": True, "norm": "layer", "activation": "gelu"},
    "swiglu with biases": {"bias": True, "kv_heads": 2},
    "columns added": {"columns": 2},
    "columns end to end": {"columns": 2, "join": "concat", "field_dim": 8},
}  # fmt: skip


def decoder(columns: int = 1, dim: int = 32, **keys: Any) -> Decoder:
    torch.manual_seed(3)
    sizes = dict(zip("ab", (50, 7), strict=True))
    config = DecoderConfig(dim=dim, layers=3, heads=4, **keys)
    model = Decoder(config, Inputs({name: sizes[name] for name in "ab"[:columns]})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def whole(model: Decoder, columns: dict[str, Tensor]) -> Tensor:
    """The last hidden states of rows, read at once."""
    first = next(iter(columns.values()))
    place = torch.arange(first.shape[1]).expand_as(first)
    return model(Tensors(columns, torch.zeros_like(first), place, whole=True))[:, -1]


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_each_id_is_read_once(style: str) -> None:
    """Rows of unequal lengths, some of which leave, more ids than there were slots at first."""
    model = decoder(**STYLES[style])
    lengths, more = [70, 9, 9, 4, 1], 80
    rows = [
        {name: torch.randint(0, size, (1, n + more)) for name, size in model.fields.sizes.items()}
        for n in lengths
    ]
    longest = max(lengths)
    right = {
        name: torch.cat(
            [
                torch.nn.functional.pad(row[name][:, :n], (longest - n, 0))
                for row, n in zip(rows, lengths, strict=True)
            ]
        )
        for name in model.fields.sizes
    }
    reader = Decoding(model)
    hidden = reader.begin(right, longest - torch.tensor(lengths))
    alive, seen = list(range(len(rows))), 0
    for step in range(more):
        for place, number in enumerate(alive):
            part = {name: ids[:, : lengths[number] + step] for name, ids in rows[number].items()}
            torch.testing.assert_close(hidden[place], whole(model, part)[0], atol=1e-5, rtol=0)
            seen += 1
        if step in (5, 30, 60):
            gone = {5: 3, 30: 0, 60: 4}[step]
            reader.keep(torch.tensor([i for i, number in enumerate(alive) if number != gone]))
            alive.remove(gone)
        hidden = reader.next(
            {
                name: torch.cat(
                    [rows[number][name][:, [lengths[number] + step]] for number in alive]
                )
                for name in model.fields.sizes
            }
        )
    assert seen > 200 and longest + more > 2 * SLOTS
    # Slots in front of the longest row that is left are given back.
    assert reader.filled == 9 + more


@torch.no_grad()
def test_a_row_may_go_on_in_several_ways() -> None:
    model = decoder()
    ids = torch.randint(0, 50, (2, 12))
    reader = Decoding(model)
    reader.begin({"a": ids}, torch.tensor([0, 5]))
    reader.keep(torch.tensor([0, 0, 1]))
    after = torch.tensor([[4], [5], [4]])
    hidden = reader.next({"a": after})
    for place, (row, start) in enumerate(((0, 0), (0, 0), (1, 5))):
        line = torch.cat([ids[row : row + 1, start:], after[place : place + 1]], 1)
        torch.testing.assert_close(hidden[place], whole(model, {"a": line})[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_many_wide_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has oneDNN's kernels, they multiply here."""
    monkeypatch.setattr(layers, "ONEDNN", layers.HAS_ONEDNN)
    model = decoder(dim=160, kv_heads=2)
    ids = torch.randint(0, 50, (9, 20))
    reader = Decoding(model)
    reader.begin({"a": ids[:, :19]}, torch.zeros(9, dtype=torch.long))
    hidden = reader.next({"a": ids[:, 19:]})
    expected = whole(model, {"a": ids})
    torch.testing.assert_close(hidden, expected, atol=3e-5, rtol=0)
