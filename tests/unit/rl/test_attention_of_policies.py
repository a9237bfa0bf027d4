"""What a policy looks at: the weights are those that the model computes with, and have names."""

from __future__ import annotations

import pytest
import torch

from tokmill.base.errors import UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.modules import problem
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.rl.embedding import embeddings
from tokmill.rl.embedding import policy_attention as attention

LINE = "conv_2d_nchw 1 3 11 4 3 2, relu"


def shown(kind: str, tokens: str = "fields") -> tuple[embeddings.Embedding, dict]:
    """Return an embedding, and one row: `relu` and its producer, with padding behind."""
    torch.manual_seed(0)
    one = problem.of_line(LINE)
    config = {"distilbert": {"tokens": tokens}}
    view = views.make(embeddings.view_of(kind, config), Sizes.of(one.operations), [one])
    embedding = embeddings.make(kind, view.spaces(), config)
    seen = view(legal.begin(one.operations[1]), one.operations[0])
    return embedding, embeddings.batch([seen])


@pytest.mark.parametrize("kind", ["distilbert", "loop_transformer"])
def test_weights_are_those_of_the_model(kind: str) -> None:
    embedding, given = shown(kind)
    embedding.eval()
    tensors = embedding.tensors(given)
    weights, states = attention.attention_of(embedding.encoder, tensors)
    rows, length = tensors.document.shape
    assert weights.shape == (2, rows, 4, length, length)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    # Tokens do not look at padding.
    outside = tensors.document[0] < 0
    assert (weights[:, 0, :, ~outside][..., outside] == 0).all()
    # The states computed from these weights are those of the fast attention.
    again = embedding.encoder(tensors)
    torch.testing.assert_close(states[0, ~outside], again[0, ~outside], rtol=1e-4, atol=1e-5)


def test_names_of_fields() -> None:
    embedding, given = shown("distilbert")
    weights, names = attention.looked_at(embedding, given)
    assert weights.shape == (2, 4, len(names))
    assert len(names) == int(given["mask"].sum())
    assert names[:4] == ["[CLS]", "type generic", "1: bound 2^0", "1: parallel"]
    assert names.count("[SEP]") == 2
    assert "[PAD]" not in names


def test_what_has_no_names_is_refused() -> None:
    for kind, tokens, said in (
        ("lstm", "fields", "no attention to fields"),
        ("loop_transformer", "fields", "no attention to fields"),
        ("distilbert", "buckets", "without names"),
    ):
        embedding, given = shown(kind, tokens)
        with pytest.raises(UsageError, match=said) as caught:
            attention.looked_at(embedding, given)
        assert caught.value.hint
