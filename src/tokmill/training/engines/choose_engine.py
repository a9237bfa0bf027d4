"""The engine that a recipe asks for."""

from __future__ import annotations

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.training.engines.engine import Engine
from tokmill.training.launch import one_a_machine, place
from tokmill.training.recipe.config import EngineConfig, RunConfig


def make_engine(config: RunConfig, settings: EngineConfig | None = None) -> Engine:
    """Return the engine that a recipe asks for; "auto" is `ddp` in one of several processes.

    `settings`: the recipe's table `[engine]`.
    """
    world = place().world
    name = config.engine
    if name == "auto":
        name = "ddp" if world > 1 else "single"
    with one_a_machine():
        if world > 1 and name == "single":
            raise UsageError(
                f"the engine single is one process, and {world} were started",
                where="run.engine",
                hint="--engine ddp shares a step among them",
            )
        # An engine is imported when it is used: one process does not need torch.distributed.
        kind = plugins.load(plugins.ENGINES, name)
        if config.compile and not kind.compiles:
            raise UsageError(
                f"the engine {name} does not compile the model",
                where="run.compile",
                hint="--set run.compile=false, or --engine ddp",
            )
    engine: Engine = kind(config, settings)
    return engine
