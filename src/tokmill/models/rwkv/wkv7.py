"""The recurrence of RWKV-7 (Peng et al. 2025, arXiv 2503.14456).

Shapes: B rows, T positions, H heads, N width of a head (of its keys and of its values).

A head keeps a state S, a matrix from keys to values (value, key). With log decays w, and S = 0
before a document's first position,

    S_t = S_{t-1} · diag(exp(w_t)) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ        y_t = S_t r_t

`step_by_step` is that, a position after the other, as sampling takes it; `chunked` a chunk of
positions at a time; `by_fla` is that in the kernels of flash-linear-attention, in
bf16 on CUDA.
"""

import importlib.util
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tokmill.plugins import require

CHUNK = 32
"""Positions of a chunk. Factors of exp(±w · CHUNK / 2) have to stay in float32's range: with
RWKV-7's w above -0.61 they stay below 2e4, and any w above -5 will do."""
SEGMENT = 256
"""Positions that `chunked` learns at a time where a row is longer than four times as many."""


def step_by_step(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `wkv7` does, from tensors of one type, a position after the other."""
    outputs = []
    keep_BT = None if document is None else continues(document).to(r.dtype)
    for t in range(r.shape[1]):
        if keep_BT is not None:
            state = state * keep_BT[:, t, None, None, None]
        removed_BHN1 = state @ a[:, t, :, :, None]
        state = (
            state * w[:, t, :, None, :].exp()
            + removed_BHN1 * b[:, t, :, None, :]
            + v[:, t, :, :, None] * k[:, t, :, None, :]
        )
        outputs.append((state @ r[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(r), state


def chunked(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> tuple[Tensor, Tensor]:
    """Return what `wkv7` does, from tensors of one type, `chunk` positions at a time.

    Where a gradient is wanted, chunks hold some eighty tensors as large as an input. So rows that
    are longer than four segments are learned a `segment` of positions at a time, each of which is
    computed again in the backward pass.
    """
    inputs = (r, w, k, v, a, b)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
    if not learns or r.shape[1] <= 4 * segment:
        return _chunks(*inputs, state, document, None, chunk)
    outputs: list[Tensor] = []
    before = None
    for start in range(0, r.shape[1], segment):
        here = slice(start, start + segment)
        number = None if document is None else document[:, here]
        parts = (x[:, here] for x in inputs)
        y_BTHN, state = checkpoint(
            _chunks,
            *parts,
            state,
            number,
            before,
            chunk,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(y_BTHN)
        before = None if number is None else number[:, -1]
    return torch.cat(outputs, 1), state


def _chunks(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None,
    before: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return outputs and state of positions that follow `state`.

    `before`: (B,) the document that the state belongs to; None: that of the first position.

    With u_i = S_{i-1} a_i, what position i adds besides v kᵀ is u_i b_iᵀ, and within a chunk the u
    solve a triangular system, once for what the chunk itself holds and once for the state before
    it. All chunks do that at once; only S → M S + P goes from one to the next.
    """
    size, length, heads, width = r.shape
    if not length:
        return torch.zeros_like(r), state
    count = -(-length // chunk)
    r, w, k, v, a, b = (_cut(x, count, chunk) for x in (r, w, k, v, a, b))  # (B, H, C, L, N)
    c = w.cumsum(-2)
    # From the middle on, so that factors of one sign of exponent reach half as far.
    m = c[..., chunk // 2 - 1 : chunk // 2, :] if chunk > 1 else torch.zeros_like(c)
    last = c[..., -1:, :]
    ahead, behind = (c - m).exp(), (m - c).exp()
    queries = torch.cat([a * (c - w - m).exp(), r * ahead], -2)  # (B, H, C, 2 L, N)
    keys = torch.cat([b, k], -2) * torch.cat([behind, behind], -2)
    scores = queries @ keys.transpose(-1, -2)  # (B, H, C, 2 L, 2 L)
    # What lies ahead is not a number where decays are strong: it is put away, not multiplied by 0.
    scores = scores.masked_fill(_hidden(chunk, scores.device), 0)
    from_before = queries * m.exp()
    to_after = torch.cat([b, k], -2) * torch.cat([(last - c).exp()] * 2, -2)
    carried = last.exp()
    if document is not None:
        within, entered, left = _borders(document, before, count, chunk)
        scores = scores * within[:, None].to(r.dtype)
        from_before = from_before * entered[:, None, :, :, None].to(r.dtype)
        to_after = to_after * left[:, None, :, :, None].to(r.dtype)
        # The whole chunk from the state before to the state after is one document.
        carried = carried * (entered[:, :, -1] & left[:, :, -1])[:, None, :, None, None]
    ab, ak = scores[..., :chunk, :chunk], scores[..., :chunk, chunk:]
    rb, rk = scores[..., chunk:, :chunk], scores[..., chunk:, chunk:]
    # [what the chunk adds by itself | what it makes of the state before]
    solved = _solve(ab, torch.cat([ak @ v, from_before[..., :chunk, :]], -1))
    own, moved = solved[..., :width], solved[..., width:]
    b_after, k_after = to_after[..., :chunk, :], to_after[..., chunk:, :]
    added = b_after.transpose(-1, -2) @ own + k_after.transpose(-1, -2) @ v  # P (key, value)
    turned = b_after.transpose(-1, -2) @ moved + torch.diag_embed(carried[..., 0, :])  # M
    entering, state = _carry(state, turned, added)
    u = own + moved @ entering
    y = from_before[..., chunk:, :] @ entering + rk @ v + rb @ u
    y_BTHN = y.permute(0, 2, 3, 1, 4).reshape(size, count * chunk, heads, width)
    return y_BTHN[:, :length], state


def _carry(state: Tensor, turned: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (B, H, C, N, N), and the last one: S → M S + P."""
    states = [state.transpose(-1, -2)]
    for i in range(turned.shape[2]):
        states.append(torch.matmul(turned[:, :, i], states[-1]) + added[:, :, i])
    return torch.stack(states[:-1], 2), states[-1].transpose(-1, -2)


def continues(document: Tensor) -> Tensor:
    """Return (B, T) whether a position goes on with the document of the one before it.

    The first of a row goes on with what its state came from.
    """
    return F.pad(document[:, 1:] == document[:, :-1], (1, 0), value=True)


def _cut(x: Tensor, count: int, chunk: int) -> Tensor:
    """Return (B, T, H, N) as (B, H, C, L, N); zeros after the end leave the state as it is."""
    size, length, heads, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, count * chunk - length))
    return x.view(size, count, chunk, heads, width).permute(0, 3, 1, 2, 4)


def _hidden(chunk: int, device: torch.device) -> Tensor:
    """Return (2 L, 2 L) bool: row i of a sees columns before i, row i of r also column i."""
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)
    here = later | torch.eye(chunk, dtype=torch.bool, device=device)
    return torch.cat([torch.cat([here, here], 1), torch.cat([later, later], 1)])


def _borders(
    document: Tensor, before: Tensor | None, count: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which pairs of a chunk are of one document, and which rows and columns reach out.

    (B, C, 2 L, 2 L); (B, C, 2 L) rows whose document is that of the state before the chunk; (B, C,
    2 L) columns whose document is the last one of the chunk.
    """
    begins = ~continues(document)
    if before is not None:
        begins = torch.cat([(document[:, 0] != before)[:, None], begins[:, 1:]], 1)
    # Behind the end the last document goes on.
    number = begins.cumsum(1)
    number = torch.cat([number, number[:, -1:].expand(-1, count * chunk - number.shape[1])], 1)
    number_BCL = number.view(len(number), count, chunk)
    entering_BC = torch.cat([number_BCL[:, :1, 0] * 0, number_BCL[:, :-1, -1]], 1)
    entered = number_BCL == entering_BC[..., None]
    left = number_BCL == number_BCL[..., -1:]
    twice = torch.cat([number_BCL, number_BCL], -1)
    within = twice[..., :, None] == twice[..., None, :]
    return within, torch.cat([entered, entered], -1), torch.cat([left, left], -1)


def _solve(strict: Tensor, right: Tensor) -> Tensor:
    """Return (I - A)⁻¹ · right for a strictly lower triangular A (…, L, L).

    Blocks on the diagonal are inverted, of 1, 2, 4 … positions: two neighbours with the inverses D₁
    and D₂, and A₂₁ between them, are [D₁ 0; D₂·A₂₁·D₁ D₂] together. These are products, which are
    faster than a triangular solve, and nothing on the way is larger than the inverse: powers of A
    reach 1e8 where keys repeat.
    """
    place = torch.arange(strict.shape[-1], device=strict.device)
    # The highest bit in which two positions differ is the level at which their blocks meet.
    apart = place[:, None] ^ place
    inverse = (apart == 0).to(strict.dtype) + strict * (apart == 1)
    for level in range(1, (len(place) - 1).bit_length()):
        between = strict * (apart >> level == 1)
        inverse = inverse + inverse @ between @ inverse
    return inverse @ right


Form = Literal["auto", "step_by_step", "chunked", "fla"]
FEW = 8
"""Positions up to which the recurrence itself costs least, where no gradient is wanted."""
HAS_FLA = importlib.util.find_spec("fla") is not None


def wkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    *,
    document: Tensor | None = None,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Return outputs and the state after the last position.

    Args:
        r, w, k, v, a, b: (B, T, H, N) of one floating type; w is the natural logarithm of the
            decay, at most 0, and above -5 for all but `step_by_step`, whose outputs alone are
            numbers below that. Half precision is computed in float32, but by `fla` in bf16.
        state: (B, H, N, N) (value, key), what a call on the positions before gave; None: zeros. It
            belongs to the first document of the row.
        document: (B, T) integers, equal within a document of the row and other than those of the
            neighbours; the state begins anew with each. None: a row is one document.
        form: "auto" chooses by T, by whether a gradient is wanted, and by device and precision.

    Returns:
        y (B, T, H, N) of the type of r; the state (B, H, N, N) in float32, or in float64.

    """
    wide = torch.promote_types(r.dtype, torch.float32)
    size, length, heads, width = r.shape
    if state is None:
        state = r.new_zeros(size, heads, width, width, dtype=wide)
    inputs = r, w, k, v, a, b
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
    if form == "auto":
        form = "fla" if HAS_FLA and _suits_fla(r) else "chunked"
        if not learns and length <= FEW:
            form = "step_by_step"
    if form == "fla":
        return by_fla(*inputs, state, document)
    inputs = r.to(wide), w.to(wide), k.to(wide), v.to(wide), a.to(wide), b.to(wide)
    compute = step_by_step if form == "step_by_step" else chunked
    # Autocast would take the products in half precision, which powers of the decay do not bear.
    with torch.autocast(r.device.type, enabled=False):
        y_BTHN, state = compute(*inputs, state.to(wide), document)
    return y_BTHN.to(r.dtype), state


def _suits_fla(r: Tensor) -> bool:
    """Say whether the kernels of fla take such tensors: they do not promise float32."""
    if r.device.type != "cuda":
        return False
    return r.dtype == torch.bfloat16 or (
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


def by_fla(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    document: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `wkv7` does, by `fla.ops.rwkv7.chunk_rwkv7` in bf16; the state stays float32.

    fla's states are (key, value). Documents of a row are sequences of unequal length to it: rows
    are put end to end, and each sequence but the first of a row begins with zeros.
    """
    size, length, heads, width = r.shape
    last = state.to(torch.float32).transpose(-1, -2)
    inputs = [x.to(torch.bfloat16) for x in (r, w, k, v, a, b)]
    if not length:
        return torch.zeros_like(r), last.transpose(-1, -2)
    ends, borders = None, None
    if document is not None:
        begins = ~continues(document)
        begins[:, 0] = True
        borders = begins.reshape(-1).nonzero().squeeze(1)
        ends = F.pad(borders, (0, 1), value=size * length)
        inputs = [x.reshape(1, size * length, heads, width) for x in inputs]
        states = last.new_zeros(len(borders), heads, width, width)
        last = states.index_copy(0, (borders % length == 0).nonzero().squeeze(1), last)
    # safe_gate: tensor cores, for w above -5.
    y, last = require("fla.ops.rwkv7").chunk_rwkv7(
        *inputs,
        initial_state=last.contiguous(),
        output_final_state=True,
        cu_seqlens=ends,
        safe_gate=True,
    )
    if borders is not None:
        # The last sequence of a row is that before the first of the next.
        last = last[torch.cat([(borders[1:] % length == 0), borders.new_ones(1, dtype=torch.bool)])]
    return y.reshape(r.shape).to(r.dtype), last.transpose(-1, -2)
