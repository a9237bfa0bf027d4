"""MLIR-RL's embedding: an LSTM over the vectors of an operation and its producer.

Tirichine et al. 2024 (arXiv 2409.11068); the sizes are those of its published configuration.
"""

import torch
from torch import Tensor, nn

from tokmill.mlir.tokens.views import Spaces
from tokmill.rl.embedding.embeddings import Embedding, EmbeddingConfig, Observation, check_sizes


class LstmConfig(EmbeddingConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an LSTM."""

    hidden_size: int = 512
    """Width of the two layers in front of it."""
    lstm_size: int = 411
    """Width of its state."""
    dropout: float = 0.0
    """Share of values dropped behind these layers while training, of which the task schedules drops
    none. The original has .225; PPO compares a policy with itself, and what is dropped makes it
    differ."""


class Lstm(Embedding):
    """Two layers on each vector, an LSTM over both, and the history beside its last state."""

    Config = LstmConfig

    def __init__(self, config: LstmConfig, spaces: Spaces) -> None:
        super().__init__()
        check_sizes(config, hidden_size=1, lstm_size=1)
        numbers, width = spaces["operation"].shape[0], config.hidden_size
        self.layers = nn.Sequential(
            nn.Linear(numbers, width),
            nn.ELU(),
            nn.Dropout(config.dropout),
            nn.Linear(width, width),
            nn.ELU(),
            nn.Dropout(config.dropout),
        )
        self.lstm = nn.LSTM(width, config.lstm_size, batch_first=True)
        self.output_size = config.lstm_size + spaces["history"].shape[0]

    def forward(self, observation: Observation) -> Tensor:
        """Return the state after the operation and its producer, and the history."""
        pair = torch.stack((observation["operation"], observation["producer"]), dim=1)
        _, (last, _) = self.lstm(self.layers(pair.float()))
        return torch.cat((last[0], observation["history"].float()), dim=-1)
