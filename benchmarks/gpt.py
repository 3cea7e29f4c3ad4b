"""A small decoder-only transformer: a row of tokens in, scores of the token after each out.

5.3 M parameters. The matrix that turns tokens into vectors is also the one that scores them (tied
weights), as in GPT-2, so its gradient is complete only at the very end of backward. Norms come
first in every block. There is no dropout, and no bias in attention: a key's bias has no influence
on the scores, and AdamW would turn the rounding noise of its gradient into steps of full length.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS = 256, 4, 4
INITIAL_STD = 0.02  # GPT-2's


class Block(nn.Module):
    """Attention over the tokens so far, then two layers on each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_hidden = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        joined = self.query_key_value(self.norm_attention(x)).view(rows, length, 3, HEADS, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        y: torch.Tensor = x + self.out(F.gelu(self.hidden(self.norm_hidden(x))))
        return y


class Gpt(nn.Module):
    """The whole network; `forward` returns one line of scores for each token of the batch."""

    def __init__(self, num_tokens: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x)).flatten(0, 1)
