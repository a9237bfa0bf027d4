"""The metrics of a task, saved in the run: reports read them without torch."""

import msgspec


class Measures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a task's metrics, and what its model can be used for."""

    loss: str = ""
    """Unit of the loss, such as "nats per token"; empty: no useful unit."""
    higher: tuple[str, ...] = ()
    """Metrics for which higher is better. For others lower is, unless their names say otherwise."""
    decided_by: tuple[str, ...] = ()
    """Keys of a recipe that decide what its loss is; those that have no effect are left out."""
    continues: bool = False
    """Whether rows can be continued: `tokmill sample`."""
