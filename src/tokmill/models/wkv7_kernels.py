# mypy: ignore-errors
# The language of kernels has Python's words and not its types.
"""Triton kernels of RWKV-7's recurrence, forward and backward; `wkv7_triton` launches them.

Names of tensors carry their shape: L positions of a chunk, N width of a head, V values (columns of
a state) that are done at a time. A state is (key, value) here.

One program does a chunk of one head, `scan` goes from chunk to chunk. Of a chunk, with c the sums
of w up to each position, m that in the middle and l that at the end, ∘ by elements (as `chunked`
in `wkv7`, whose formulas these are):

    A = a∘exp(c-w-m)    R = r∘exp(c-m)    B = b∘exp(m-c)      K = k∘exp(m-c)
    A' = A∘exp(m)       R' = R∘exp(m)     B' = B∘exp(l-m)     K' = K∘exp(l-m)
    ab = A·Bᵀ, ak = A·Kᵀ below the diagonal      rb = R·Bᵀ, rk = R·Kᵀ up to it
    U = I⁻·(ak·V + A'·S)     Y = R'·S + rk·V + rb·U     S⁺ = exp(l)∘S + B'ᵀ·U + K'ᵀ·V

where I⁻ = (I - ab)⁻¹. So S⁺ = exp(l)∘S + M·S + P with M = B'ᵀ·I⁻·A' and P = B'ᵀ·I⁻·ak·V + K'ᵀ·V.

The backward pass has the gradients dY and G = dS⁺, and takes the lines in turn, from the last:

    dU = rbᵀ·dY + B'·G       dX = I⁻ᵀ·dU       dV = rkᵀ·dY + akᵀ·dX + K'·G
    dS = exp(l)∘G + R'ᵀ·dY + A'ᵀ·dX = exp(l)∘G + Mᵀ·G + Q       Q = (R' + rb·I⁻·A')ᵀ·dY
    d(ab) = dX·Uᵀ, d(ak) = dX·Vᵀ, d(rb) = dY·Uᵀ, d(rk) = dY·Vᵀ, each where it is not zero
    dA = d(ab)·B + d(ak)·K     dB = d(ab)ᵀ·A + d(rb)ᵀ·R     dR, dK alike
    dA' = dX·Sᵀ     dR' = dY·Sᵀ     dB' = U·Gᵀ     dK' = V·Gᵀ

so that S and G come from the same kind of scan. Decays stand in exponents alone: that of A' is the
sum of w before its position, of R' the sum up to it, of B' and K' the sum after it, and m cancels.
With da, dr, db, dk the whole gradients,

    dw_j = Σ_{i>j} (a∘da)_i + Σ_{i≥j} (r∘dr - b∘db - k∘dk)_i
           + Σ_i (B'∘dB' + K'∘dK')_i + exp(l)∘Σ_v (S∘G)_v

A border between documents is a mask: scores of two documents are 0, as are A' and R' after the
first border of a chunk, B' and K' before its last, and exp(l) where there is one.

Products are of float32 numbers, summed in float32. With PRECISION "tf32" tensor cores cut them off
after 11 bits, at half the rate of bf16 and with 3 bits more, for numbers that the decays scale;
"tf32x3" does three such products and is as good as float32. What a state keeps, exp(l)∘S, goes
through no product: cut off once a chunk, a long memory would fade. Emulated over 1,024 positions,
"tf32" is 1.5e-3 of the norm away in outputs, 3e-3 in the gradients of a and b, and does not grow.
"""

from tokmill.plugins import require

triton = require("triton")
tl = require("triton.language")


@triton.jit
def place(length, heads, chunks, L: tl.constexpr, N: tl.constexpr):
    """Return this program's number, row and first position, and two facts of positions, (L, 1).

    Where they lie in (B, T, H, N), and whether they are there.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks // heads
    head = program // chunks % heads
    first = program % chunks * L
    t_L = first + tl.arange(0, L)
    lines_L = ((row * length + t_L) * heads + head) * N
    return program, row, first, lines_L[:, None], (t_L < length)[:, None]


@triton.jit
def tile(x, spots, inside):
    """Return values in float32, 0 after the end: such positions leave a state as it is."""
    return tl.load(x + spots, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def put(x, spots, values, inside):
    """Write values in the type of what x points to."""
    tl.store(x + spots, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def borders(number, row, first, length, L: tl.constexpr):
    """Return what the numbers of documents (B, T), which rise along a row, say of a chunk.

    Whether i sees j up to itself, and before itself (L, L); whether a position is of the document
    that the state before comes from, and of that which the state after is of (L, 1); whether these
    two are one. Behind the end the last document goes on.
    """
    number += row * length
    i_L = tl.arange(0, L)
    here_L = tl.load(number + tl.minimum(first + i_L, length - 1))
    entering = tl.load(number + tl.maximum(first - 1, 0))
    leaving = tl.load(number + tl.minimum(first + L, length) - 1)
    same_LL = here_L[:, None] == here_L[None, :]
    lower_LL = same_LL & (i_L[:, None] >= i_L[None, :])
    strict_LL = same_LL & (i_L[:, None] > i_L[None, :])
    entered_L1, left_L1 = (here_L == entering)[:, None], (here_L == leaving)[:, None]
    return lower_LL, strict_LL, entered_L1, left_L1, entering == leaving


@triton.jit
def decays(w_LN, L: tl.constexpr):
    """Return c (L, N), m and l (1, N)."""
    i_L1 = tl.arange(0, L)[:, None]
    middle_N = tl.sum(tl.where(i_L1 < L // 2, w_LN, 0.0), 0)
    return tl.cumsum(w_LN, 0), middle_N[None, :], tl.sum(w_LN, 0)[None, :]


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return x · y."""
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def scores(r_LN, k_LN, a_LN, b_LN, lower, strict, PRECISION: tl.constexpr):
    """Return ak, rb and rk from R, K, A and B."""
    ak_LL = tl.where(strict, product(a_LN, tl.trans(k_LN), PRECISION), 0.0)
    rb_LL = tl.where(lower, product(r_LN, tl.trans(b_LN), PRECISION), 0.0)
    rk_LL = tl.where(lower, product(r_LN, tl.trans(k_LN), PRECISION), 0.0)
    return ak_LL, rb_LL, rk_LL


@triton.jit
def inverse(strict_LL, L: tl.constexpr, LEVELS: tl.constexpr):
    """Return (I - A)⁻¹ of A below the diagonal; L = 2^LEVELS.

    Blocks on the diagonal are inverted, of 1, 2, 4 … positions: two neighbours with the inverses D₁
    and D₂, and A₂₁ between them, are [D₁ 0; D₂·A₂₁·D₁ D₂] together. Nothing on the way is larger
    than the inverse, as powers of A are where keys repeat.
    """
    i_L = tl.arange(0, L)
    # The highest bit in which two positions differ is the level at which their blocks meet.
    apart_LL = i_L[:, None] ^ i_L[None, :]
    done_LL = tl.where(apart_LL == 0, 1.0, tl.where(apart_LL == 1, strict_LL, 0.0))
    for level in tl.static_range(1, LEVELS):
        between_LL = tl.where((apart_LL >> level) == 1, strict_LL, 0.0)
        done_LL += product(product(done_LL, between_LL, "tf32x3"), done_LL, "tf32x3")
    return done_LL


@triton.jit
def chunk_states(
    w, k, v, a, b, number, inverses, turned, added, carried, length, heads, chunks,
    L: tl.constexpr, N: tl.constexpr, V: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write I⁻ to `inverses`, M to `turned`, P to `added`, exp(l) to `carried`."""
    program, row, first, lines, inside = place(length, heads, chunks, L, N)
    lower, strict, entered, left, whole = borders(number, row, first, length, L)
    i_L, n_N, v_V = tl.arange(0, L), tl.arange(0, N), tl.arange(0, V)
    spots = lines + n_N[None, :]
    w_LN = tile(w, spots, inside)
    c_LN, m_1N, l_1N = decays(w_LN, L)
    a_LN = tile(a, spots, inside) * tl.exp(c_LN - w_LN - m_1N)
    b_LN, k_LN = tile(b, spots, inside), tile(k, spots, inside)
    behind_LN = tl.exp(m_1N - c_LN)
    ab_LL = tl.where(strict, product(a_LN, tl.trans(b_LN * behind_LN), PRECISION), 0.0)
    ak_LL = tl.where(strict, product(a_LN, tl.trans(k_LN * behind_LN), PRECISION), 0.0)
    inverse_LL = inverse(ab_LL, L, LEVELS)
    tl.store(inverses + program * L * L + i_L[:, None] * L + i_L[None, :], inverse_LL)

    after_LN = tl.where(left, tl.exp(l_1N - c_LN), 0.0)
    b_LN *= after_LN
    k_LN *= after_LN
    moved_LN = product(inverse_LL, tl.where(entered, a_LN * tl.exp(m_1N), 0.0), PRECISION)
    lines_N1 = program * N * N + n_N[:, None] * N
    tl.store(turned + lines_N1 + n_N[None, :], product(tl.trans(b_LN), moved_LN, PRECISION))
    tl.store(carried + program * N + n_N[None, :], tl.where(whole, tl.exp(l_1N), 0.0))
    for start in range(0, N, V):
        v_LV = tile(v, lines + start + v_V[None, :], inside)
        own_LV = product(inverse_LL, product(ak_LL, v_LV, PRECISION), PRECISION)
        added_NV = product(tl.trans(b_LN), own_LV, PRECISION)
        added_NV += product(tl.trans(k_LN), v_LV, PRECISION)
        tl.store(added + lines_N1 + start + v_V[None, :], added_NV)


@triton.jit
def scan(
    turned, added, carried, state, states, final, chunks,
    N: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk to `states`, and the one after all to `final`.

    S⁺ = exp(l)∘S + M·S + P from the first chunk to the last; REVERSE: with Mᵀ, from the last to the
    first. `state` and `final` are (value, key). A program does V values of one head.
    """
    program = tl.program_id(0).to(tl.int64)
    head, start = program // (N // V), program % (N // V) * V
    n_N, v_V = tl.arange(0, N), start + tl.arange(0, V)
    outside_NV = head * N * N + v_V[None, :] * N + n_N[:, None]
    state_NV = tl.load(state + outside_NV)
    for step in range(chunks):
        if REVERSE:
            chunk = head * chunks + chunks - 1 - step
        else:
            chunk = head * chunks + step
        lines_N1 = chunk * N * N + n_N[:, None] * N
        turned_NN = tl.load(turned + lines_N1 + n_N[None, :])
        if REVERSE:
            turned_NN = tl.trans(turned_NN)
        kept_NV = tl.load(carried + chunk * N + n_N)[:, None] * state_NV
        kept_NV += tl.load(added + lines_N1 + v_V[None, :])
        tl.store(states + lines_N1 + v_V[None, :], state_NV)
        state_NV = kept_NV + product(turned_NN, state_NV, PRECISION)
    tl.store(final + outside_NV, state_NV)


@triton.jit
def outputs(
    r, w, k, v, a, b, number, inverses, states, y, length, heads, chunks,
    L: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write Y."""
    program, row, first, lines, inside = place(length, heads, chunks, L, N)
    lower, strict, entered, left, whole = borders(number, row, first, length, L)
    i_L, n_N, v_V = tl.arange(0, L), tl.arange(0, N), tl.arange(0, V)
    spots = lines + n_N[None, :]
    w_LN = tile(w, spots, inside)
    c_LN, m_1N, l_1N = decays(w_LN, L)
    upto_LN, before_w_LN = tl.exp(c_LN - m_1N), tl.exp(c_LN - w_LN - m_1N)
    behind_LN = tl.exp(m_1N - c_LN)
    r_LN, a_LN = tile(r, spots, inside) * upto_LN, tile(a, spots, inside) * before_w_LN
    b_LN, k_LN = tile(b, spots, inside) * behind_LN, tile(k, spots, inside) * behind_LN
    ak_LL, rb_LL, rk_LL = scores(r_LN, k_LN, a_LN, b_LN, lower, strict, PRECISION)
    inverse_LL = tl.load(inverses + program * L * L + i_L[:, None] * L + i_L[None, :])

    before_LN = tl.where(entered, tl.exp(m_1N), 0.0)
    r_LN *= before_LN
    a_LN *= before_LN
    for start in range(0, N, V):
        columns = lines + start + v_V[None, :]
        v_LV = tile(v, columns, inside)
        square_NV = program * N * N + n_N[:, None] * N + start + v_V[None, :]
        state_NV = tl.load(states + square_NV)
        x_LV = product(ak_LL, v_LV, PRECISION) + product(a_LN, state_NV, PRECISION)
        u_LV = product(inverse_LL, x_LV, PRECISION)
        y_LV = product(r_LN, state_NV, PRECISION) + product(rk_LL, v_LV, PRECISION)
        y_LV += product(rb_LL, u_LV, PRECISION)
        put(y, columns, y_LV, inside)


@triton.jit
def chunk_gradients(
    r, w, a, b, number, inverses, dy, turned, added, carried, length, heads, chunks,
    L: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write M to `turned`, Q to `added`, exp(l) to `carried`."""
    program, row, first, lines, inside = place(length, heads, chunks, L, N)
    lower, strict, entered, left, whole = borders(number, row, first, length, L)
    i_L, n_N, v_V = tl.arange(0, L), tl.arange(0, N), tl.arange(0, V)
    spots = lines + n_N[None, :]
    w_LN = tile(w, spots, inside)
    c_LN, m_1N, l_1N = decays(w_LN, L)
    r_LN = tile(r, spots, inside) * tl.exp(c_LN - m_1N)
    a_LN = tile(a, spots, inside) * tl.exp(c_LN - w_LN)
    b_LN = tile(b, spots, inside)
    rb_LL = product(r_LN, tl.trans(b_LN * tl.exp(m_1N - c_LN)), PRECISION)
    rb_LL = tl.where(lower, rb_LL, 0.0)
    inverse_LL = tl.load(inverses + program * L * L + i_L[:, None] * L + i_L[None, :])

    moved_LN = product(inverse_LL, tl.where(entered, a_LN, 0.0), PRECISION)
    b_LN *= tl.where(left, tl.exp(l_1N - c_LN), 0.0)
    lines_N1 = program * N * N + n_N[:, None] * N
    tl.store(turned + lines_N1 + n_N[None, :], product(tl.trans(b_LN), moved_LN, PRECISION))
    tl.store(carried + program * N + n_N[None, :], tl.where(whole, tl.exp(l_1N), 0.0))
    back_LN = tl.where(entered, r_LN * tl.exp(m_1N), 0.0) + product(rb_LL, moved_LN, PRECISION)
    for start in range(0, N, V):
        dy_LV = tile(dy, lines + start + v_V[None, :], inside)
        added_NV = product(tl.trans(back_LN), dy_LV, PRECISION)
        tl.store(added + lines_N1 + start + v_V[None, :], added_NV)


@triton.jit
def value_gradients(
    r, w, k, v, a, b, number, inverses, states, dstates, dy, dv, u, dx, length, heads, chunks,
    L: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dV, and U and dX, which `key_gradients` takes; `dstates`: G of each chunk."""
    program, row, first, lines, inside = place(length, heads, chunks, L, N)
    lower, strict, entered, left, whole = borders(number, row, first, length, L)
    i_L, n_N, v_V = tl.arange(0, L), tl.arange(0, N), tl.arange(0, V)
    spots = lines + n_N[None, :]
    w_LN = tile(w, spots, inside)
    c_LN, m_1N, l_1N = decays(w_LN, L)
    behind_LN = tl.exp(m_1N - c_LN)
    r_LN = tile(r, spots, inside) * tl.exp(c_LN - m_1N)
    a_LN = tile(a, spots, inside) * tl.exp(c_LN - w_LN - m_1N)
    b_LN, k_LN = tile(b, spots, inside) * behind_LN, tile(k, spots, inside) * behind_LN
    ak_LL, rb_LL, rk_LL = scores(r_LN, k_LN, a_LN, b_LN, lower, strict, PRECISION)
    inverse_LL = tl.load(inverses + program * L * L + i_L[:, None] * L + i_L[None, :])

    a_LN *= tl.where(entered, tl.exp(m_1N), 0.0)
    after_LN = tl.where(left, tl.exp(l_1N - m_1N), 0.0)
    b_LN *= after_LN
    k_LN *= after_LN
    for start in range(0, N, V):
        columns = lines + start + v_V[None, :]
        v_LV, dy_LV = tile(v, columns, inside), tile(dy, columns, inside)
        square_NV = program * N * N + n_N[:, None] * N + start + v_V[None, :]
        s_NV, g_NV = tl.load(states + square_NV), tl.load(dstates + square_NV)
        x_LV = product(ak_LL, v_LV, PRECISION) + product(a_LN, s_NV, PRECISION)
        between_LV = program * L * N + i_L[:, None] * N + start + v_V[None, :]
        tl.store(u + between_LV, product(inverse_LL, x_LV, PRECISION))
        du_LV = product(tl.trans(rb_LL), dy_LV, PRECISION) + product(b_LN, g_NV, PRECISION)
        dx_LV = product(tl.trans(inverse_LL), du_LV, PRECISION)
        tl.store(dx + between_LV, dx_LV)
        dv_LV = product(tl.trans(rk_LL), dy_LV, PRECISION) + product(k_LN, g_NV, PRECISION)
        dv_LV += product(tl.trans(ak_LL), dx_LV, PRECISION)
        put(dv, columns, dv_LV, inside)


@triton.jit
def key_gradients(
    r, w, k, v, a, b, number, states, dstates, dy, u, dx, dr, dw, dk, da, db,
    length, heads, chunks,
    L: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all inputs but v."""
    program, row, first, lines, inside = place(length, heads, chunks, L, N)
    lower, strict, entered, left, whole = borders(number, row, first, length, L)
    i_L, n_N, v_V = tl.arange(0, L), tl.arange(0, N), tl.arange(0, V)
    dab_LL = tl.zeros((L, L), tl.float32)
    dak_LL, drb_LL, drk_LL = dab_LL, dab_LL, dab_LL
    # Of A', R', B' and K'.
    da_LN = tl.zeros((L, N), tl.float32)
    dr_LN, db_LN, dk_LN = da_LN, da_LN, da_LN
    dcarried_N = tl.zeros((N,), tl.float32)
    for start in range(0, N, V):
        columns = lines + start + v_V[None, :]
        v_LV, dy_LV = tile(v, columns, inside), tile(dy, columns, inside)
        between_LV = program * L * N + i_L[:, None] * N + start + v_V[None, :]
        u_LV, dx_LV = tl.load(u + between_LV), tl.load(dx + between_LV)
        square_NV = program * N * N + n_N[:, None] * N + start + v_V[None, :]
        s_NV, g_NV = tl.load(states + square_NV), tl.load(dstates + square_NV)
        dab_LL += product(dx_LV, tl.trans(u_LV), PRECISION)
        dak_LL += product(dx_LV, tl.trans(v_LV), PRECISION)
        drb_LL += product(dy_LV, tl.trans(u_LV), PRECISION)
        drk_LL += product(dy_LV, tl.trans(v_LV), PRECISION)
        da_LN += product(dx_LV, tl.trans(s_NV), PRECISION)
        dr_LN += product(dy_LV, tl.trans(s_NV), PRECISION)
        db_LN += product(u_LV, tl.trans(g_NV), PRECISION)
        dk_LN += product(v_LV, tl.trans(g_NV), PRECISION)
        dcarried_N += tl.sum(s_NV * g_NV, 1)
    dab_LL, dak_LL = tl.where(strict, dab_LL, 0.0), tl.where(strict, dak_LL, 0.0)
    drb_LL, drk_LL = tl.where(lower, drb_LL, 0.0), tl.where(lower, drk_LL, 0.0)

    spots = lines + n_N[None, :]
    w_LN = tile(w, spots, inside)
    c_LN, m_1N, l_1N = decays(w_LN, L)
    upto_LN, before_w_LN = tl.exp(c_LN - m_1N), tl.exp(c_LN - w_LN - m_1N)
    behind_LN = tl.exp(m_1N - c_LN)
    b_LN, k_LN = tile(b, spots, inside) * behind_LN, tile(k, spots, inside) * behind_LN
    after_LN = tl.where(left, tl.exp(l_1N - m_1N), 0.0)
    db_LN, dk_LN = db_LN * after_LN, dk_LN * after_LN
    dl_N = tl.sum(b_LN * db_LN + k_LN * dk_LN, 0)
    dl_N += tl.sum(tl.where(whole, tl.exp(l_1N), 0.0), 0) * dcarried_N
    # Of A, R, B and K: what they are in scores besides.
    before_LN = tl.where(entered, tl.exp(m_1N), 0.0)
    r_LN, a_LN = tile(r, spots, inside) * upto_LN, tile(a, spots, inside) * before_w_LN
    da_LN = da_LN * before_LN + product(dab_LL, b_LN, PRECISION)
    da_LN += product(dak_LL, k_LN, PRECISION)
    dr_LN = dr_LN * before_LN + product(drb_LL, b_LN, PRECISION)
    dr_LN += product(drk_LL, k_LN, PRECISION)
    db_LN += product(tl.trans(dab_LL), a_LN, PRECISION)
    db_LN += product(tl.trans(drb_LL), r_LN, PRECISION)
    dk_LN += product(tl.trans(dak_LL), a_LN, PRECISION)
    dk_LN += product(tl.trans(drk_LL), r_LN, PRECISION)
    # A∘dA is a∘da, and so on: the exponents are in the one or the other.
    aa_LN = a_LN * da_LN
    dw_LN = tl.cumsum(aa_LN + r_LN * dr_LN - b_LN * db_LN - k_LN * dk_LN, 0, reverse=True)
    dw_LN += dl_N[None, :] - aa_LN
    put(dw, spots, dw_LN, inside)
    put(da, spots, da_LN * before_w_LN, inside)
    put(dr, spots, dr_LN * upto_LN, inside)
    put(db, spots, db_LN * behind_LN, inside)
    put(dk, spots, dk_LN * behind_LN, inside)
