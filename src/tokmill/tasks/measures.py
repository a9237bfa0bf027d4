"""What a task measures, as reports are told: they read a run's files and load no model."""

from __future__ import annotations

import msgspec


class Measures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be known of a task's metrics, and what can be done with its model."""

    loss: str = ""
    """Unit of the loss, such as "nats a token"; empty: it has none that says much."""
    higher: tuple[str, ...] = ()
    """Metrics of which more is better; of others less is, unless their names tell."""
    continues: bool = False
    """Whether rows can be continued: `tokmill sample`."""
