"""The recurrence of RWKV-7: all forms are one function, gradients and states too."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokmill.base.errors import MissingExtraError
from tokmill.models.rwkv.wkv7 import by_fla, chunked, step_by_step, wkv7
from tokmill.training.budget.memory import Peak


def inputs(
    rows: int, length: int, heads: int = 2, width: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return r, w, k, v, a, b as the model makes them, and a state."""
    torch.manual_seed(length)

    def draw() -> Tensor:
        return torch.randn(rows, length, heads, width, dtype=dtype)

    unit = torch.nn.functional.normalize(draw(), dim=-1)
    made = [draw(), -0.6065 * torch.sigmoid(draw()), draw(), draw()]
    made += [-unit, unit * torch.sigmoid(draw())]
    made.append(torch.randn(rows, heads, width, width, dtype=dtype))
    return [x.requires_grad_() for x in made]


def documents(rows: int, length: int, borders: set[int]) -> Tensor:
    begins = torch.zeros(rows, length, dtype=torch.int64)
    for place in borders:
        begins[place % rows, place % length] = 1
    return begins.cumsum(1)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 50),
    chunk=st.sampled_from([1, 2, 5, 16, 32, 64]),
    segment=st.sampled_from([1, 7, 16, 64]),
    borders=st.none() | st.sets(st.integers(0, 200), max_size=8),
)
def test_chunks_equal_single_steps(
    length: int, chunk: int, segment: int, borders: set[int] | None
) -> None:
    """Outputs, final state and all gradients, with and without several documents in a row."""
    made = inputs(2, length)
    document = None if borders is None else documents(2, length, borders)
    upstream = [torch.randn(made[i].shape, dtype=torch.float64) for i in (0, 6)]
    results = []
    by_chunks = chunked(*made, document, chunk=chunk, segment=segment)
    for y, state in (step_by_step(*made, document), by_chunks):
        loss = (y * upstream[0]).sum() + (state * upstream[1]).sum()
        results.append([y, state, *torch.autograd.grad(loss, made)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(length=st.integers(2, 70), cut=st.integers(1, 69), document=st.booleans())
def test_a_row_may_be_cut_anywhere(length: int, cut: int, document: bool) -> None:
    """Two calls that hand on the state are one call; a border may lie at the cut."""
    cut = min(cut, length - 1)
    *six, state = (x.detach() for x in inputs(2, length))
    number = documents(2, length, {cut, cut // 2}) if document else None
    whole, last = wkv7(*six, state, document=number, form="chunked")
    first, middle = wkv7(
        *(x[:, :cut] for x in six), state, document=number if number is None else number[:, :cut]
    )
    # The state is of the document that ends at the cut, which the next call has to be told.
    if number is not None:
        new = number[:, cut] != number[:, cut - 1]
        middle = middle * ~new[:, None, None, None]
        number = number[:, cut:]
    second, end = wkv7(*(x[:, cut:] for x in six), middle, document=number)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=1e-11, atol=1e-12)


def test_documents_of_a_row_equal_rows_of_their_own() -> None:
    *six, state = (x.detach() for x in inputs(1, 61))
    number = documents(1, 61, {3, 35, 36})
    together, _ = wkv7(*six, state * 0, document=number, form="chunked")
    for value in number.unique():
        mine = number[0] == value
        alone, _ = wkv7(*(x[:, mine] for x in six))
        torch.testing.assert_close(together[:, mine], alone, rtol=1e-11, atol=1e-12)


def test_a_segment_is_held_at_a_time() -> None:
    """The most bytes of tensors that are alive hardly grow with the length of the row."""
    most = []
    for segment in (64, 1024):
        with FakeTensorMode():
            made = inputs(1, 1024, width=16, dtype=torch.float32)
            with Peak() as peak:
                y, _ = chunked(*made, segment=segment)
                y.sum().backward()
            most.append(peak.most)
    assert most[0] < most[1] / 3


@pytest.mark.parametrize("dtype, near", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_lower_precisions_are_near(dtype: torch.dtype, near: float) -> None:
    *six, _ = (x.detach() for x in inputs(2, 130, width=16))
    exact, state = wkv7(*six, form="step_by_step")
    for form in ("step_by_step", "chunked"):
        y, last = wkv7(*(x.to(dtype) for x in six), form=form)  # type: ignore[arg-type]
        assert y.dtype == dtype and last.dtype == torch.float32
        assert (y.double() - exact).norm() < near * exact.norm()
        assert (last.double() - state).norm() < near * state.norm()


@pytest.mark.parametrize("decay", [-0.6066, -2.8, -4.99])
def test_strong_decays_stay_numbers(decay: float) -> None:
    """In float32, over chunks of the model's strongest decay alone, and of what is promised."""
    made = [x.detach().float() for x in inputs(1, 64)]
    made[1] = torch.full_like(made[1], decay)
    results = []
    for form in ("chunked", "step_by_step"):
        given = [x.clone().requires_grad_() for x in made]
        y, _ = wkv7(*given, form=form)  # type: ignore[arg-type]
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_one_key_again_and_again() -> None:
    """As in a run of one token: what a chunk adds to the state is next to all that it takes away.

    Powers of the triangular matrix are huge then, and in float32 sums of them mean nothing.
    """
    made = [x.detach() for x in inputs(1, 64, width=16)]
    key = torch.nn.functional.normalize(torch.randn(1, 1, 2, 16, dtype=torch.float64), dim=-1)
    made[1], made[4], made[5] = (x.expand(1, 64, 2, 16) for x in (key * 0 - 1e-4, -key, key))
    results = []
    for dtype, compute in ((torch.float64, step_by_step), (torch.float32, chunked)):
        given = [x.to(dtype).requires_grad_() for x in made]
        y, state = compute(*given)
        results.append([y, state, *torch.autograd.grad(y.sum(), given)])
    for exact, near in zip(*results, strict=True):
        assert (near.double() - exact).norm() < 1e-5 * exact.norm()


def test_nothing_is_no_error() -> None:
    *six, state = (x.detach() for x in inputs(2, 3))
    y, same = wkv7(*(x[:, :0] for x in six), state)
    assert y.shape == (2, 0, 2, 4) and torch.equal(same, state)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    safe_gate: bool,
) -> tuple[Tensor, Tensor]:
    """What fla's documentation says of its function, from the recurrence in float64."""
    assert output_final_state and safe_gate and initial_state.dtype == torch.float32
    assert all(x.dtype == torch.bfloat16 for x in (r, w, k, v, a, b))
    six = [x.double() for x in (r, w, k, v, a, b)]
    states = initial_state.double().transpose(-1, -2)
    if cu_seqlens is None:
        y, last = step_by_step(*six, states)
    else:
        assert len(r) == 1 and len(states) == len(cu_seqlens) - 1
        ends = cu_seqlens.tolist()
        parts = [
            step_by_step(*(x[:, begin:end] for x in six), states[number, None])
            for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))
        ]
        y, last = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    return y.to(r.dtype), last.float().transpose(-1, -2)


@settings(deadline=None, max_examples=30)
@given(length=st.integers(1, 20), borders=st.none() | st.sets(st.integers(0, 60), max_size=8))
def test_documents_are_sequences_to_fla(length: int, borders: set[int] | None) -> None:
    """With its function by the recurrence: states and gradients arrive in their places."""
    made = [x.detach().bfloat16().double() for x in inputs(3, length)]
    document = None if borders is None else documents(3, length, borders) % 2
    stand_in: Any = ModuleType("fla.ops.rwkv7")
    stand_in.chunk_rwkv7 = chunk_rwkv7
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", ModuleType("fla"))
        patch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
        patch.setitem(sys.modules, "fla.ops.rwkv7", stand_in)
        results = []
        for compute in (step_by_step, by_fla):
            given = [x.clone().requires_grad_() for x in made]
            y, state = compute(*given, document)
            results.append([y, state, *torch.autograd.grad(y.sum() + state.sum(), given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.double(), one, rtol=2e-2, atol=2e-2)


def test_without_fla_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    *six, _ = (x.detach().float() for x in inputs(1, 20))
    with pytest.raises(MissingExtraError, match="'fla' is not installed"):
        wkv7(*six, form="fla")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("length, borders", [(1, ()), (130, ()), (200, (3, 40, 41, 150))])
def test_fla_equals_single_steps(length: int, borders: tuple[int, ...]) -> None:
    """Outputs, state and gradients on a GPU, against float64 from the same rounded inputs."""
    pytest.importorskip("fla.ops.rwkv7", reason="fla-core is not installed: the extra fla")
    made = [x.detach().bfloat16() for x in inputs(2, length, width=64)]
    document = documents(2, length, set(borders)).cuda() if borders else None
    results = []
    for form, dtype in (("step_by_step", torch.float64), ("fla", torch.bfloat16)):
        given = [x.to("cuda", dtype).requires_grad_() for x in made]
        y, state = wkv7(*given, document=document, form=form)  # type: ignore[arg-type]
        loss = y.double().sum() + state.double().sum()
        results.append([y, state, *torch.autograd.grad(loss, given)])
    for one, other in zip(*results, strict=True):
        assert (other.double() - one).norm() < 3e-2 * one.norm()
