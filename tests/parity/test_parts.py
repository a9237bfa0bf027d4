"""Each part alone against PyTorch's own, or the formula in float64: plain tensors in and out."""

import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from own_loop import LanguageModel, cosine_schedule, load_checkpoint, save_checkpoint
from tokmill.models.transformers.attention import (
    Attention,
    attention,
    causal_attention,
    rotary,
    rotate,
)
from tokmill.models.transformers.block import Block
from tokmill.models.transformers.layers import (
    FeedForward,
    embedding,
    gelu,
    linear,
    linear_cross_entropy,
    rms_norm,
    silu,
    swiglu,
)
from tokmill.models.transformers.transformer import DecoderConfig
from tokmill.training.engines.optimisers.optim import clip_gradients, make_optimizer
from tokmill.training.recipe.config import OptimConfig

B, T, D, H, F_, V = 3, 12, 32, 4, 80, 40
GPT2 = DecoderConfig(
    dim=D, layers=2, heads=H, hidden=F_, norm="layer", position="learned", activation="gelu",
    bias=True, context=T,
)  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-5, rtol=1e-5)


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot products in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scores = torch.einsum("...tk,...sk->...ts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def test_linear() -> None:
    x, weight, bias = torch.randn(B, T, D), torch.randn(F_, D), torch.randn(F_)
    close(linear(x, weight), torch.einsum("btd,fd->btf", x.double(), weight.double()))
    close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_embedding() -> None:
    ids, weight = torch.randint(V, (B, T)), torch.randn(V, D)
    close(embedding(ids, weight), weight[ids])


def test_norms() -> None:
    x, weight = 3 * torch.randn(B, T, D) + 1, torch.randn(D)
    wide = x.double()
    root = (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    close(rms_norm(x, weight, 1e-3), wide / root * weight)


def test_activations() -> None:
    x = torch.randn(B, T, D) * 3
    close(silu(x), x.double() * torch.sigmoid(x.double()))
    close(gelu(x), x.double() * torch.special.ndtr(x.double()))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    close(gelu(x, approximate=True), 0.5 * x * (1 + torch.tanh(inner)))


def test_swiglu() -> None:
    x, w1, w2, w3 = (torch.randn(*shape) for shape in ((B, T, D), (F_, D), (D, F_), (F_, D)))
    wide = [one.double() for one in (x, w1, w2, w3)]
    expected = (F.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[3].T)) @ wide[2].T
    torch.testing.assert_close(swiglu(x, w1, w2, w3).double(), expected, atol=1e-3, rtol=1e-5)
    branch = FeedForward(D, F_)
    branch.load_state_dict({"gate.weight": w1, "down.weight": w2, "up.weight": w3})
    close(branch(x), swiglu(x, w1, w2, w3))


def test_rope_is_a_product_of_complex_numbers() -> None:
    x, place = torch.randn(B, H, T, D), torch.randint(1000, (B, 1, T))
    angle = place[..., None] * 10_000.0 ** -(torch.arange(0, D, 2).double() / D)
    pairs = torch.view_as_complex(x.double().reshape(B, H, T, D // 2, 2))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    halves = rotate(torch.cat((x[..., ::2], x[..., 1::2]), -1), rotary(place, D))
    wanted = torch.cat((expected[..., ::2], expected[..., 1::2]), -1).float()
    torch.testing.assert_close(halves, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("lead", [(), (B,), (B, H), (2, B, H)])
def test_attention(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, n, 8) for n in (T, T + 3, T + 3))
    mask = torch.rand(*lead, T, T + 3) < 0.7
    mask[..., 0] = True
    close(attention(q, k, v, mask), by_formula(q, k, v, mask))
    everywhere = torch.ones(T, T + 3, dtype=torch.bool)
    close(attention(q, k, v), by_formula(q, k, v, everywhere))
    close(causal_attention(q, q, q), by_formula(q, q, q, everywhere[:, :T].tril()))


def test_heads_without_positions() -> None:
    weights = {part: torch.randn(D, D) / 6 for part in "qkvo"}
    layer, x = Attention(D, H), torch.randn(B, T, D)
    layer.load_state_dict({f"{part}.weight": weight for part, weight in weights.items()})
    peer = nn.MultiheadAttention(D, H, bias=False, batch_first=True)
    peer.load_state_dict(
        {
            "in_proj_weight": torch.cat([weights["q"], weights["k"], weights["v"]]),
            "out_proj.weight": weights["o"],
        }
    )
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    close(layer(x), peer(x, x, x, attn_mask=ahead, need_weights=False)[0])


def test_heads_with_rotary_positions() -> None:
    weights = {part: torch.randn(D, D) / 6 for part in "qkvo"}
    x, place, theta = torch.randn(B, T, D), torch.arange(7, 7 + T), 500.0

    def heads(part: str) -> Tensor:
        return (x @ weights[part].T).view(B, T, H, D // H).transpose(1, 2)

    q, k = (rotate(heads(part), rotary(place, D // H, theta)) for part in "qk")
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    y = by_formula(q, k, heads("v"), seen).transpose(1, 2).flatten(2)
    layer = Attention(D, H)
    layer.load_state_dict({f"{part}.weight": weight for part, weight in weights.items()})
    close(layer(x, rotary(place, D // H, theta)), y @ weights["o"].double().T)


def peer_layer(block: Block) -> nn.TransformerEncoderLayer:
    """The block as PyTorch's own, which has norms in front as well."""
    own = {name: value.detach() for name, value in block.named_parameters()}
    peer = nn.TransformerEncoderLayer(
        D, H, F_, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
    )
    state = {}
    for leaf in ("weight", "bias"):
        joined = [own[f"attention.{part}.{leaf}"] for part in "qkv"]
        state[f"self_attn.in_proj_{leaf}"] = torch.cat(joined)
        for theirs, ours in {
            "self_attn.out_proj": "attention.o",
            "linear1": "feed_forward.up",
            "linear2": "feed_forward.down",
            "norm1": "attention_norm",
            "norm2": "feed_forward_norm",
        }.items():
            state[f"{theirs}.{leaf}"] = own[f"{ours}.{leaf}"]
    peer.load_state_dict(state)
    return peer


def drawn(module: nn.Module) -> None:
    """Draw all weights anew, larger than at the start."""
    for name, parameter in module.named_parameters():
        mean = float(parameter.ndim == 1 and name.endswith("weight"))
        nn.init.normal_(parameter, mean=mean, std=0.2)


def test_block() -> None:
    block, x = Block(GPT2), torch.randn(B, T, D)
    drawn(block)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    close(block(x), peer_layer(block)(x, src_mask=mask, is_causal=True))


def test_language_model() -> None:
    model, ids = LanguageModel(GPT2, V, tied=False), torch.randint(V, (B, T))
    drawn(model)
    state = model.state_dict()
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    x = state["model.fields.embeddings.column_token.weight"][ids] + state["model.positions.weight"]
    for block in model.model.blocks:
        assert isinstance(block, Block)
        x = peer_layer(block)(x, src_mask=mask, is_causal=True)
    x = F.layer_norm(x, (D,), state["model.norm.weight"], state["model.norm.bias"])
    close(model(ids), x @ state["heads.linear.column_token.weight"].T)


def test_cross_entropy() -> None:
    hidden, weight = torch.randn(2, B, T, D), torch.randn(V, D)
    targets = torch.randint(V, (2, B, T))
    logits = hidden.double() @ weight.double().T
    likely = logits.log_softmax(-1).gather(-1, targets[..., None])
    close(linear_cross_entropy(hidden, weight, targets), -likely.sum())


@pytest.mark.parametrize("limit", [0.1, 1e3])
def test_gradient_clipping(limit: float) -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(4, 5)) for _ in range(4)] for _ in range(2))
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        one.grad = torch.randn(4, 5)
        other.grad = one.grad.clone()
    close(clip_gradients(ours, limit), nn.utils.clip_grad_norm_(theirs, limit))
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert one.grad is not None and other.grad is not None
        close(one.grad, other.grad)
    assert ours[3].grad is None


def test_adamw_by_its_formula() -> None:
    weight = nn.Parameter(torch.randn(5, 3))
    config = OptimConfig(lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    optimizer = make_optimizer([{"params": [weight], "weight_decay": 0.1, "lr_scale": 1.0}], config)
    expected, first, second = weight.detach().double(), 0.0, 0.0
    for step in range(1, 6):
        gradient = torch.randn(5, 3)
        weight.grad = gradient.clone()
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.99 * second + 0.01 * gradient.double() ** 2
        expected = expected * (1 - 1e-2 * 0.1)
        root = (second / (1 - 0.99**step)).sqrt() + 1e-8
        expected = expected - 1e-2 * (first / (1 - 0.9**step)) / root
        close(weight.detach(), expected)


def test_cosine_schedule() -> None:
    rates = [cosine_schedule(step, 1.0, 0.1, 7, 21) for step in range(25)]
    assert rates[:8] == pytest.approx([step / 7 for step in range(8)])
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=14, eta_min=0.1)
    for step in range(7, 22):
        assert rates[step] == pytest.approx(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    assert rates[21:] == [0.1] * 4
    assert cosine_schedule(0, 1.0, 0.1, 0, 10) == 1.0


def test_a_loaded_checkpoint_goes_on_to_the_bit() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    learn(model, optimizer, 1)
    file = io.BytesIO()
    save_checkpoint(model, optimizer, 17, file)
    other, its = make()
    assert load_checkpoint(file, other, its) == 17
    before, after = optimizer.state_dict(), its.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for one in (0, 1):
        for key in before["state"][one]:
            assert torch.equal(before["state"][one][key], after["state"][one][key])
    learn(model, optimizer, 2)
    learn(other, its, 2)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
