"""A policy in thirty lines, for tests: a GRU cell with an output head and a value head."""

from __future__ import annotations

import torch
from torch import nn

from k3rl.model.batch import ForwardOutput, PolicyCapabilities, TokenBatch, TokenLogprobs
from k3rl.model.tape import Tape


class ToyPolicy(nn.Module):
    """Reads packed sequences one by one, so that a row cannot depend on its neighbours. Implements ``Policy``."""

    capabilities = PolicyCapabilities(chunk=False, routes=False, value=True)

    def __init__(self, vocab_size: int = 11, hidden_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab_size, hidden_size)
            self.cell = nn.GRU(hidden_size, hidden_size)
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
            self.value_head = nn.Linear(hidden_size, 1)

    def forward(self, batch: TokenBatch, cache: None = None) -> ForwardOutput:
        """Hidden states [T, D]; no cache and no routes."""
        parts = self.embedding(batch.ids).split(batch.lengths.tolist())
        hidden = torch.cat([self.cell(part)[0] if len(part) else part for part in parts])
        return ForwardOutput(hidden, None, None)

    def token_logprobs(self, hidden_MD: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> TokenLogprobs:
        """Log-probability, entropy and log-sum-exp of the scaled logits, each [M]."""
        logits = self.lm_head(hidden_MD) / temperature
        lse = logits.logsumexp(-1)
        log_p = logits - lse[:, None]
        logprob = log_p.gather(-1, targets_M[:, None])[:, 0]
        return TokenLogprobs(logprob, -(log_p.exp() * log_p).sum(-1), lse)

    def values(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Value estimates [M]."""
        return self.value_head(hidden_MD)[:, 0]

    def tape(self, num_rows: int) -> Tape:
        """Not there: it reads sequences as a whole."""
        raise NotImplementedError

    def muon_blocks(self) -> dict[str, int]:
        """No parameter is cut into heads."""
        return {}
