"""Who sees whom, where a position stands, and that all ways to say so agree."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.feed.feed import Batch
from tokmill.models.model import Tensors
from tokmill.models.transformers import attention as attention_module
from tokmill.models.transformers.attention import (
    Attend,
    Seen,
    attention,
    attention_at,
    attention_by_document,
    attention_by_kernel,
    causal_attention,
    document_attention,
    document_mask,
    has_kernel,
)
from tokmill.tasks.task import borders, is_whole, positions, to_tensors

LENGTHS = [9, 6, 9, 18, 6, 15, 9]
"""Of documents, in rows of 24; the fifth is padding."""
DOCUMENTS = np.repeat([0, 1, 2, 0, -1, 3, 4], LENGTHS).reshape(3, 24)


def batch_of(document: np.ndarray) -> Tensors:
    keys = np.zeros(len(document), np.uint64)
    ids = np.zeros(document.shape, np.int64)
    return to_tensors(Batch({"token": ids}, document.astype(np.int32), keys), torch.device("cpu"))


def qkv(document: np.ndarray, heads: int = 4, groups: int = 4, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    rows, length = document.shape
    # Heads beside one another in memory, as the projections leave them.
    made = [torch.randn(rows, length, n, width).transpose(1, 2) for n in (heads, groups, groups)]
    return [one.requires_grad_() for one in made]


WAYS = ["whole", "mask", "by document"]
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["back", "both"])


def by_formula(q: Tensor, k: Tensor, v: Tensor, document: np.ndarray, seen: Seen) -> Tensor:
    """Softmax over what a position may look at, which is found a pair at a time."""
    length = document.shape[1]
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    scores = scores / q.shape[-1] ** 0.5
    for row, i, j in np.ndindex(len(document), length, length):
        apart = document[row, i] != document[row, j] or (seen.causal and j > i)
        if apart:
            scores[row, :, i, j] = -torch.inf
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@CAUSAL
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_equal_the_formula(
    way: str, dtype: torch.dtype, groups: int, causal: bool
) -> None:
    """Outputs and gradients, in rows that hold documents and padding or are one document."""
    document = DOCUMENTS[:1] * 0 if way == "whole" else DOCUMENTS
    batch, seen = batch_of(document), Seen(causal)
    if way == "mask":
        batch.cu_seqlens = None
    inputs = [x.detach().to(dtype).requires_grad_() for x in qkv(document, groups=groups)]
    attend = document_attention(batch, dtype, 8, seen)
    plain = causal_attention if causal else attention
    functions = {"whole": plain, "mask": attention, "by document": attention_by_document}
    assert getattr(attend, "func", attend) is functions[way]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = attend(*inputs), by_formula(*wide, document, seen)
    assert found.dtype == dtype
    # Sums of up to 24 terms of about 1, in an order that the processor chooses.
    close = {"atol": 4e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(found.double(), expected, **close)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream.to(dtype)),
        torch.autograd.grad(expected, wide, upstream.to(dtype).double()),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, **close)


@CAUSAL
@pytest.mark.parametrize("whole", [True, False])
def test_queries_of_some_positions_see_what_they_saw(whole: bool, causal: bool) -> None:
    document, seen = DOCUMENTS * 0 if whole else DOCUMENTS, Seen(causal)
    batch, (q, k, v) = batch_of(document), qkv(document)
    places = torch.tensor([[0, 5, 23], [9, -1, -1], [14, 15, 16]])
    row = torch.arange(3)[:, None]
    found = attention_at(batch, places, seen)(q[row, :, places].transpose(1, 2), k, v)
    expected = attention(q, k, v, document_mask(batch.document, seen))[row, :, places]
    used = places >= 0
    torch.testing.assert_close(found.transpose(1, 2)[used], expected[used], atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="the kernel needs CUDA and an Ampere GPU or a newer one",
)
@CAUSAL
@pytest.mark.parametrize("groups", [4, 2])
def test_the_kernel_for_documents_equals_the_mask(groups: int, causal: bool) -> None:
    document, seen = DOCUMENTS, Seen(causal)
    batch = batch_of(document)
    borders = batch.cu_seqlens
    assert borders is not None
    inputs = [x.detach().cuda().bfloat16().requires_grad_() for x in qkv(document, groups=groups)]
    found = attention_by_kernel(*inputs, borders=borders.cuda(), seen=seen)
    expected = attention(*inputs, document_mask(batch.document.cuda(), seen))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, same: Tensor, longest: int, *_: int,
    window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What PyTorch says that its kernel computes."""
    assert starts is same and starts.dtype == torch.int32 and longest >= int(starts.diff().max())
    done = []
    for first, last in itertools.pairwise(starts.tolist()):
        one = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        place = torch.arange(last - first)
        apart, (left, right) = place - place[:, None], window_size
        seen = (apart >= -left if left >= 0 else True) & (
            apart <= right if right >= 0 else apart == apart
        )
        done.append(F.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=enable_gqa))
    return torch.cat([one[0].transpose(0, 1) for one in done])


@CAUSAL
@pytest.mark.parametrize("whole", [True, False])
def test_the_kernel_is_asked_for_what_the_mask_allows(
    whole: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: its arguments, read as PyTorch documents them, give what the mask gives."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention_module, "has_kernel", lambda *_: True)
    document, seen = DOCUMENTS * 0 if whole else DOCUMENTS, Seen(causal)
    batch, inputs = batch_of(document), qkv(document, groups=2)
    attend = document_attention(batch, torch.bfloat16, 8, seen)
    assert (getattr(attend, "func", attend) is attention_by_kernel) == (not whole)
    expected = attention(*inputs, document_mask(batch.document, seen))
    torch.testing.assert_close(attend(*inputs), expected, atol=1e-6, rtol=1e-5)


@CAUSAL
def test_which_attention_is_chosen(causal: bool) -> None:
    packed, whole, seen = batch_of(DOCUMENTS), batch_of(DOCUMENTS[:1] * 0), Seen(causal)
    plain = causal_attention if causal else attention
    assert document_attention(whole, torch.float32, 8, seen) is plain
    fast = document_attention(packed, torch.float32, 8, seen)
    assert isinstance(fast, partial) and fast.func is attention_by_document
    assert fast.keywords == {"lengths": LENGTHS, "seen": seen}
    many = batch_of(np.arange(24).reshape(1, 24) // 7)
    assert many.cu_seqlens is not None and len(many.cu_seqlens) == 5
    packed.cu_seqlens = None
    for batch in (many, packed):
        masked = document_attention(batch, torch.float32, 8, seen)
        assert isinstance(masked, partial) and masked.func is attention
        assert torch.equal(masked.keywords["mask"], document_mask(batch.document, seen))
    assert not has_kernel(torch.device("cpu"), torch.bfloat16, 8)
    assert not has_kernel(torch.device("cuda"), torch.float32, 8)
    assert not has_kernel(torch.device("cuda"), torch.bfloat16, 12)


def dropping(way: str, causal: bool) -> tuple[np.ndarray, Attend]:
    """The documents of a batch, and its attention that drops a quarter."""
    document = DOCUMENTS[:1] * 0 if way == "whole" else DOCUMENTS
    batch = batch_of(document)
    if way == "mask":
        batch.cu_seqlens = None
    return document, document_attention(batch, torch.float32, 8, Seen(causal, 0.25))


@CAUSAL
@pytest.mark.parametrize("way", [*WAYS, "places"])
def test_probabilities_are_dropped_one_by_one(way: str, causal: bool) -> None:
    """Values that are unit vectors show the probabilities: 0, or grown by 1 / (1 - share)."""
    document, attend = dropping(way, causal)
    seen, (rows, length) = Seen(causal), document.shape
    q, k, _ = qkv(document)
    eye = torch.eye(length).expand(rows, 4, length, length)
    plain = attention(q, k, eye, document_mask(torch.from_numpy(document), seen))
    if way == "places":
        places = torch.arange(length).flip(0).expand(rows, length)
        attend = attention_at(batch_of(document), places, seen._replace(dropout=0.25))
        q, plain = q.flip(2), plain.flip(2)
    torch.manual_seed(5)
    found = attend(q, k, eye)
    dropped = found == 0
    torch.testing.assert_close(found, torch.where(dropped, 0, plain / 0.75), atol=1e-6, rtol=1e-5)
    of_seen = dropped[plain > 0].float().mean().item()
    assert of_seen == pytest.approx(0.25, abs=0.05)
    torch.manual_seed(5)
    assert torch.equal(found, attend(q, k, eye))
    assert not torch.equal(found, attend(q, k, eye))


def test_the_kernel_is_not_asked_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot; the mask stands in for it."""
    monkeypatch.setattr(attention_module, "has_kernel", lambda *_: True)
    batch = batch_of(DOCUMENTS)
    for seen in (Seen(dropout=0.1), Seen(False, 0.1)):
        attend = document_attention(batch, torch.bfloat16, 8, seen)
        assert isinstance(attend, partial) and attend.func is not attention_by_kernel
        assert attend.keywords.get("dropout", seen.dropout) == 0.1


def test_borders_and_positions() -> None:
    document = np.array([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    assert borders(document).tolist() == [0, 2, 5, 6, 12]
    assert positions(document).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert not is_whole(document) and is_whole(document[1:])
    packed = batch_of(document)
    assert packed.cu_seqlens is not None and packed.cu_seqlens.dtype == torch.int32
    assert batch_of(document[1:]).cu_seqlens is None
