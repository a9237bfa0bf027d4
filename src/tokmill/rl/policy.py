"""The model of a policy: what it sees of an operation, as one vector, by one of the embeddings.

Its heads give scores for every part of an action (`actions`), and the value of the state.
"""

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_share
from tokmill.mlir.space import LOOPS
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.mlir.tokens.views import Spaces, Wanted
from tokmill.models.model import Inputs, Model, Tensors
from tokmill.rl.actions import Layout, Scores
from tokmill.rl.embedding import embeddings
from tokmill.rl.embedding.embeddings import Embedding

SEEN = "sees."
"""How the names of observed arrays begin in `Tensors.values`."""
ALLOWED = "may."
"""How the names of masks begin in `Tensors.values`."""
MANY_NUMBERS, MANY_WEIGHTS = 2_500, 20_000_000
"""Above these a note is printed before a training begins."""
MOST_SIZES = {"hidden": embeddings.MOST, "depth": embeddings.MOST_LAYERS, "loops": 64,
              "accesses": 64, "dimensions": 64}  # fmt: skip
"""Key of [model] → its largest value."""
LONGEST = 512
"""Most tokens of a sequence in the view `fields`; a module that needs more is refused."""


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a policy sees of an operation, and its sizes."""

    kind: Literal["policy"] = "policy"
    model_type: str = "lstm"
    """What makes a vector of an operation: lstm, distilbert or loop_transformer."""
    model_config: dict[str, dict[str, Any]] = {}
    """Sizes of each model_type: `[model.model_config.distilbert]`."""
    hidden: int = 256
    """Width of the layers behind it."""
    depth: int = 2
    """How many layers stand behind it."""
    loops: int = 8
    """Loops that an operation may have; packing doubles those of a product of matrices."""
    accesses: int = 4
    """Loads that an operation may have, and stores."""
    dimensions: int = 5
    """Dimensions that a tensor may have."""

    def __post_init__(self) -> None:
        # Before anything is made of them: the arrays of an observation grow with their product.
        for name, most in MOST_SIZES.items():
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(
                    f"model.{name}: {getattr(self, name)} is not from 1 to {most:,}",
                    hint=f"--set model.{name}={getattr(type(self)(), name)} is the default",
                )

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            loops=self.loops,
            accesses=self.accesses,
            dimensions=self.dimensions,
            normalize="log2",
        )

    @property
    def view(self) -> Wanted:
        wanted = embeddings.view_of(self.model_type, self.model_config)
        if wanted.kind == "fields" and not wanted.max_seq_length:
            # Weights must not depend on the modules that a run happens to learn from.
            wanted = msgspec.structs.replace(wanted, max_seq_length=LONGEST)
        return wanted

    def notes(self) -> list[str]:
        """Return what is doubtful about the sizes, before a training begins."""
        spaces, lines = self.spaces, []
        numbers = spaces["operation"].shape[0] if "operation" in spaces else 0
        if numbers > MANY_NUMBERS:
            lines.append(
                f"an operation is {numbers:,} numbers: model.loops, model.accesses and "
                "model.dimensions decide it"
            )
        length = spaces["ids"].shape[0] if "ids" in spaces else 0
        if length > LONGEST:
            lines.append(
                f"{self.model_type} reads sequences of {length:,} tokens, and attention takes time "
                'by the square of them: tokens = "fields" has a few hundred'
            )
        lines += self._cuts()
        with torch.device("meta"):
            weights = sum(one.numel() for one in Policy(self, Inputs()).parameters())
        if weights > MANY_WEIGHTS:
            lines.append(
                f"the policy has {weights:,} weights: on a CPU one of a million learns sooner; "
                f"model.model_config.{self.model_type} has its sizes"
            )
        table = f"model.model_config.{self.model_type}"
        sizes = embeddings.config_of(self.model_type, self.model_config)
        for key, why in sizes.unused().items():
            lines.append(
                f"{table}.{key} = {msgspec.structs.asdict(sizes)[key]} has no effect: {why}"
            )
        return lines

    def _cuts(self) -> list[str]:
        view = views.make(self.view, self.sizes, [])
        if isinstance(view, views.Buckets):
            kept, length = view.tokenizer.coverage(), view.tokenizer.max_seq_length
            if kept.kept == kept.numbers:
                return []
            return [
                f"sequences are cut to {length:,} tokens: {kept.kept:,} of {kept.numbers:,} "
                f"numbers ({human_share(kept.share)}) are kept"
            ]
        if isinstance(view, views.Fields) and self.view.truncate:
            return [f"sequences that are longer are cut to {view.length:,} tokens: truncate = true"]
        return []

    @property
    def spaces(self) -> Spaces:
        return views.make(self.view, self.sizes, []).spaces()


class Policy(Model):
    """An embedding and fully connected layers; (B, 1, D)."""

    Config = PolicyConfig
    causal = False

    def __init__(self, config: PolicyConfig, inputs: Inputs) -> None:
        super().__init__()
        self.config, self.dim = config, config.hidden
        self.spaces = config.spaces
        self.observes = embeddings.make(config.model_type, self.spaces, config.model_config)
        layers: list[nn.Module] = []
        width = self.observes.output_size + len(LOOPS.kinds) + config.loops * len(LOOPS.sizes)
        weights = config.hidden * (width + (config.depth - 1) * config.hidden)
        if weights > embeddings.MOST_WEIGHTS:
            raise UsageError(
                f"the layers behind {config.model_type} would have {weights:,} weights",
                where="model.hidden, model.depth",
                hint=f"at most {embeddings.MOST_WEIGHTS:,}: choose smaller sizes",
            )
        for _ in range(config.depth):
            layers += [nn.Linear(width, config.hidden), nn.ReLU()]
            width = config.hidden
        self.backbone = nn.Sequential(*layers)

    @property
    def embedding(self) -> Embedding:
        """Return what makes a vector of an observation; a policy has no columns of ids."""
        return self.observes

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        """Return a state of each row, (B, 1, D)."""
        seen = {
            name.removeprefix(SEEN): value
            for name, value in batch.values.items()
            if name.startswith(SEEN)
        }
        # What is allowed says how large the innermost tile is now, and whether it is small enough
        # for a vector: the actions taken say so only in many steps.
        kinds, cuts = batch.values[ALLOWED + "kind"], batch.values[ALLOWED + "cuts"]
        may = torch.cat((kinds, cuts.any(1).flatten(1)), dim=1).float()
        hidden: Tensor = self.backbone(torch.cat((self.observes(seen), may), dim=1))
        return hidden[:, None]

    def flops_per_token(self, length: int) -> float:
        """Return 6 operations a weight, as for any fully connected layer."""
        return 6.0 * sum(parameter.numel() for parameter in self.parameters())


class Heads(nn.Module):
    """Scores of every part of an action, and the value; from states (B, D)."""

    def __init__(self, width: int, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.kind = nn.Linear(width, len(layout.kinds))
        self.tiles = nn.Linear(width, len(layout.cuts) * layout.loops * layout.tiles)
        self.order = nn.Linear(width, layout.loops * layout.loops)
        self.value = nn.Linear(width, 1)
        for head in (self.kind, self.tiles, self.order):
            # The first policy is nearly even.
            nn.init.normal_(head.weight, std=0.01 / width**0.5)
            nn.init.zeros_(head.bias)

    def forward(self, states: Tensor) -> tuple[Scores, Tensor]:
        """Return scores and values (B,)."""
        rows, layout = len(states), self.layout
        tiles = self.tiles(states).view(rows, len(layout.cuts), layout.loops, layout.tiles)
        order = self.order(states).view(rows, layout.loops, layout.loops)
        return Scores(self.kind(states), tiles, order), self.value(states)[:, 0].float()
