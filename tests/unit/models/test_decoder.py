"""The decoder: documents do not see each other, nothing looks ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokmill.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.decoder import Decoder, DecoderConfig, rotary, rotate
from tokmill.models.model import Tensors
from tokmill.tasks.task import is_whole, positions, to_tensors

CPU = torch.device("cpu")
SMALL = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2)


def tensors(ids: np.ndarray, document: np.ndarray) -> Tensors:
    keys = np.zeros(len(ids), np.uint64)
    return to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), CPU)


def decoder(config: DecoderConfig = SMALL, **sizes: int) -> Decoder:
    torch.manual_seed(1)
    model = Decoder(config, sizes or {"token": 11})
    for parameter in model.parameters():
        # Larger than at the start, so that a leak could not hide below the tolerance.
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else None
    return model


def test_packed_documents_equal_separate_ones() -> None:
    random = np.random.default_rng(0)
    lengths = [5, 1, 7, 3]
    ids = random.integers(0, 11, (1, 20))
    document = np.append(np.repeat(np.arange(4), lengths), [-1] * 4)[None]
    model = decoder()
    packed = model(tensors(ids, document))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        batch = tensors(ids[:, part], np.zeros((1, length)))
        assert batch.whole
        torch.testing.assert_close(packed[:, part], model(batch), atol=1e-5, rtol=1e-5)
        start += length
    assert torch.isfinite(packed).all()


def test_the_mask_and_the_causal_flag_agree() -> None:
    batch = tensors(np.arange(22).reshape(2, 11) % 11, np.zeros((2, 11)))
    model = decoder()
    fast = model(batch)
    batch.whole = False
    torch.testing.assert_close(fast, model(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_no_output_depends_on_what_comes_later(whole: bool) -> None:
    model = decoder()
    document = np.zeros((1, 9)) if whole else np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    batch = tensors(np.arange(9)[None], document)
    embedded: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.fields.register_forward_hook(keep)
    hidden = model(batch)
    for t in range(9):
        (gradient,) = torch.autograd.grad(hidden[0, t].sum(), embedded[0], retain_graph=True)
        reached = gradient[0].abs().sum(-1) > 0
        expected = (np.arange(9) <= t) & (document[0] == document[0, t])
        assert reached.tolist() == expected.tolist()


def test_positions_restart_with_each_document() -> None:
    document = np.array([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    assert positions(document).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert not is_whole(document) and is_whole(document[1:])


def test_rotary_scores_depend_on_distance_alone() -> None:
    query, keyed = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        turned = [
            rotate(x, *rotary(torch.tensor([[p]]), 8, 10_000.0))
            for x, p in ((query, i), (keyed, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-4)


def test_only_matrices_decay() -> None:
    model = decoder()
    decayed, plain = model.param_groups(0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    grouped = decayed["params"] + plain["params"]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_initial_weights_have_the_promised_spread() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(dim=64, layers=8, heads=4), {"token": 500})
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
        assert parameter.std().item() == pytest.approx(0.02 / (4 if adds else 1), rel=0.05)


def test_columns_are_added_and_may_have_any_name() -> None:
    model = decoder(type=5, token=11, forward=3)
    ids = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("type", "token", "forward")}
    total = sum(model.embedding(name)[0] for name in ids)
    torch.testing.assert_close(model.fields(ids)[0, 0], total)
    with pytest.raises(UsageError, match="no column 'tokem'"):
        model.embedding("tokem")


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(dim=10, heads=4),
        DecoderConfig(dim=12, heads=4),
        DecoderConfig(heads=4, kv_heads=3),
        DecoderConfig(layers=0),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: DecoderConfig) -> None:
    with pytest.raises(UsageError):
        Decoder(config, {"token": 3})


def test_flops_are_counted_by_hand() -> None:
    config = DecoderConfig(dim=8, layers=2, heads=2, hidden=16)
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert Decoder(config, {"token": 3}).flops_per_token(10) == 6 * weights + 6 * 2 * 8 * 10
