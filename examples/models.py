"""Models as users have them, for `ddlkit advise --model examples/models.py:decoder`: model and loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

WORDS, TOKENS, BATCH = 2000, 64, 4


class Block(nn.Module):
    """Attention and feed-forward, with a matrix each for query, key, value and output: sixteen tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = (
            heads,
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in "qkvo"
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        x = x + self.out(
            scaled_dot_product_attention(*heads, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(torch.relu(self.up(self.between(x))))


class Decoder(nn.Module):
    """Twelve blocks, each computed anew in backward, and a head tied to the embedding."""

    def __init__(self, width: int = 128, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.tokens(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return {"logits": self.head(self.norm(x))}


def decoder(device: torch.device) -> tuple[Any, ...]:
    """Many small tensors; tied, checkpointed, and what it returns is a dict."""
    model = Decoder().to(device)
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), device=device)

    def loss() -> Tensor:
        return cross_entropy(
            model(words[:, :-1])["logits"].flatten(0, 1), words[:, 1:].flatten()
        )

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4)


def embedded(device: torch.device) -> tuple[Any, ...]:
    """One tensor has most of all bytes, its gradient ready last; the first layer after it is frozen."""
    model = nn.Sequential(
        nn.Embedding(40_000, 64), nn.Flatten(), nn.LayerNorm(64 * 32), nn.Linear(64 * 32, 512),
        *(layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(512, 512))), nn.Linear(512, 100),
    ).to(device)  # fmt: skip
    model[2].requires_grad_(False)
    words, labels = (
        torch.randint(40_000, (64, 32), device=device),
        torch.randint(100, (64,), device=device),
    )
    return model, lambda: cross_entropy(model(words), labels)
