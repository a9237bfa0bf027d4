"""A Transformer over the loops of an operation: a position a loop, not a position a token.

The tokens of a loop (the view `fields`) become one vector: the sum of a layer over each of them, as
in Zaheer et al. 2017 (Deep Sets). In front of an operation's loops stands one vector for the tokens
that are of no loop, and `[CLS]` in front of all. Added to each are its role (`[CLS]`, operation,
producer), the operation's type and the depth of its loop.

Shapes: B observations, T tokens, P positions, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.mlir.modules.operations import KINDS
from tokmill.mlir.tokens import field_tokens
from tokmill.mlir.tokens.views import Spaces, Wanted
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.transformer import Encoder, EncoderConfig
from tokmill.rl.embedding.embeddings import (
    EmbeddingConfig,
    Encoded,
    Observation,
    draw_blocks,
)

SLOTS = 32
"""Rows of indices, and actions, that are told apart; later ones share the last."""
OFFSETS = 16
"""Places behind the begin of a row or an action that are told apart."""


class LoopTransformerConfig(EmbeddingConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the Transformer."""

    hidden_size: int = 128
    """Width of the hidden states."""
    num_attention_heads: int = 4
    """Heads of each layer."""
    num_hidden_layers: int = 2
    """Layers."""
    intermediate_size: int = 0
    """Width of the feed-forward branch; 0: 2 times hidden_size."""
    dropout: float = 0.0
    """Share of values dropped while training, of which the task schedules drops none."""

    def view(self) -> Wanted:
        return Wanted(kind="fields")


class LoopTransformer(Encoded):
    """A norm in front of each branch, which trains without a warm-up."""

    Config = LoopTransformerConfig

    def __init__(self, config: LoopTransformerConfig, spaces: Spaces) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.deepest = int(spaces["depths"].high.max())
        self.tokens = nn.Embedding(int(spaces["ids"].high.max()) + 1, width)
        self.slots = nn.Embedding(2 * SLOTS, width)
        self.offsets = nn.Embedding(OFFSETS, width)
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.encoder = Encoder(
            EncoderConfig(
                dim=width,
                layers=config.num_hidden_layers,
                heads=config.num_attention_heads,
                hidden=config.intermediate_size or 2 * width,
                context=self.deepest + 1,
                norm_place="pre",
                embedding_norm=False,
                dropout=config.dropout,
            ),
            Inputs(vectors={"loop": width}, ids={"role": 3, "type": len(KINDS) + 1}),
        )
        assert self.encoder.positions is not None
        for part in (self.encoder.fields.embeddings, self.encoder.positions):
            for weight in part.parameters():
                # As large as the norm makes the sums.
                nn.init.normal_(weight)
        draw_blocks(self.encoder.blocks)
        self.output_size = width + spaces["history"].shape[0]

    def tensors(self, observation: Observation) -> Tensors:
        """Return the positions that the encoder reads.

        These are `[CLS]`, the operation and its loops by depth, the producer and its loops.
        Positions that no token belongs to are padding.
        """
        mask_BT = observation["mask"].long()
        keep = int(mask_BT.sum(dim=1).max())
        mask_BT = mask_BT[:, :keep]
        ids_BT, segment_BT, depth_BT = (
            observation[name].long()[:, :keep] for name in ("ids", "segments", "depths")
        )
        loops = int(depth_BT.max())
        # [CLS] is the first token, and the only one of position 0.
        place_BT = 1 + segment_BT * (1 + loops) + depth_BT
        place_BT = place_BT * (torch.arange(keep, device=place_BT.device) > 0)
        token_BTD = self.tokens(ids_BT)
        for table, number_BT in zip(
            (self.slots, self.offsets), numbers(ids_BT, segment_BT), strict=True
        ):
            token_BTD = token_BTD + table(number_BT)
        token_BTD = F.gelu(self.layer(token_BTD)) * mask_BT[..., None]
        count = 1 + 2 * (1 + loops)
        sum_BPD = token_BTD.new_zeros(len(ids_BT), count, token_BTD.shape[2])
        sum_BPD = sum_BPD.scatter_add(1, place_BT[..., None].expand_as(token_BTD), token_BTD)
        used_BP = mask_BT.new_zeros(len(ids_BT), count).scatter_add(1, place_BT, mask_BT) > 0
        place_P = torch.arange(count, device=ids_BT.device)
        role_P = (place_P > 0).long() + (place_P > 1 + loops).long()
        depth_P = torch.where(place_P > 0, (place_P - 1) % (1 + loops), 0)
        return Tensors(
            columns={
                "loop": self.norm(sum_BPD),
                "role": role_P.expand_as(used_BP),
                "type": types(ids_BT, segment_BT)[:, role_P],
            },
            document=used_BP.long() - 1,
            position=depth_P.expand_as(used_BP),
            whole=bool(used_BP.all()),
        )


def types(ids_BT: Tensor, segment_BT: Tensor) -> Tensor:
    """Return (B, 3): the types of `[CLS]` (none), operation and producer; 0 for none."""
    first = field_tokens.VOCABULARY[f"type {KINDS[0]}"]
    kind_BT = ids_BT - first + 1
    kind_BT = torch.where((kind_BT > 0) & (kind_BT <= len(KINDS)), kind_BT, 0)
    kinds = [(kind_BT * (segment_BT == segment)).amax(dim=1) for segment in (0, 1)]
    return torch.stack((torch.zeros_like(kinds[0]), *kinds), dim=1)


def numbers(ids_BT: Tensor, segment_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the number of its row of indices or of its action, and its place in it.

    Rows are counted from 0 in each segment, actions from `SLOTS`. Without these the sum of a loop's
    tokens would not say which operand a factor is of, and which action was first.
    """
    row_BT = ids_BT == field_tokens.VOCABULARY["row"]
    actions = [number for name, number in field_tokens.VOCABULARY.items() if "action " in name]
    action_BT = torch.isin(ids_BT, torch.tensor(actions, device=ids_BT.device))
    behind_BT = segment_BT == 1
    rows_BT = row_BT.cumsum(dim=1)
    own_B1 = (row_BT & ~behind_BT).sum(dim=1, keepdim=True)
    rows_BT = (rows_BT - own_B1 * behind_BT).clamp(max=SLOTS - 1)
    actions_BT = action_BT.cumsum(dim=1).clamp(max=SLOTS) - 1 + SLOTS
    history_BT = (actions_BT >= SLOTS) & ~behind_BT
    slot_BT = torch.where(history_BT, actions_BT, rows_BT)
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    start_BT = torch.where(row_BT | action_BT, place_T, 0).cummax(dim=1).values
    return slot_BT, (place_T - start_BT).clamp(max=OFFSETS - 1)
