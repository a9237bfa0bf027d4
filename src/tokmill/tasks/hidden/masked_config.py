"""Keys of the task masked, and their checks."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokmill.base.errors import UsageError
from tokmill.tasks.task_inputs import RowKind


class HiddenConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which tokens are hidden, and which columns of them are predicted."""

    length: int = 128
    """Positions T of a row, including special tokens."""
    columns: tuple[str, ...] = ()
    """The columns to predict; empty: all that the model reads. All are hidden together."""
    share: float = 0.15
    """Share of the tokens that are hidden; rounded in each row, at least one token."""
    most: int = 0
    """Most hidden tokens of a row; 0: no limit."""
    mask_share: float = 0.8
    """Share of the hidden tokens that become [MASK]."""
    random_share: float = 0.1
    """Share of the hidden tokens that become a random token; the others stay as they are."""
    tied: bool = True
    """Whether the head of a column is its embedding."""


class MaskedConfig(HiddenConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How hidden tokens are learned."""

    kind: Literal["masked"] = "masked"
    """Which task this is."""
    rows: RowKind = "windows"
    """windows: of all records end to end; stream: that begin anywhere; packed: whole documents side
    by side; whole: one record per row, between [CLS] and [SEP] where the vocabulary has them."""
    step: int = 0
    """Tokens from one window to the next; 0: `length`."""
    segment: bool | Literal["always"] = True
    """Whether the model reads the segment of each token, if the store has it; always: if it has
    none too, and then all tokens are in the first segment."""


def check_shares(config: HiddenConfig) -> None:
    """Refuse shares that hide nothing or are not from 0 to 1."""
    shares = {"share": config.share, "mask_share": config.mask_share}
    shares["random_share"] = config.random_share
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UsageError(
                f"{name}: {value} is not a share",
                where=f"task.{name}",
                hint=f"from 0 to 1: --set task.{name}={getattr(MaskedConfig(), name)}",
            )
    if not config.share:
        raise UsageError(
            "no token is hidden, so there is nothing to learn",
            where="task.share",
            hint="--set task.share=0.15",
        )
    shown = config.mask_share + config.random_share
    if not shown or shown > 1 + 1e-9:
        raise UsageError(
            f"{config.mask_share} and {config.random_share} are more than all hidden tokens"
            if shown
            else "all hidden tokens stay as they are, so the model sees what it has to predict",
            where="task.mask_share",
            hint="--set task.mask_share=0.8 --set task.random_share=0.1",
        )
    if config.most < 0:
        raise UsageError(
            f"most: {config.most} tokens cannot be hidden", where="task.most", hint="0: any number"
        )
