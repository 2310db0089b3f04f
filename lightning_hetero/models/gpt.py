"""A decoder-only transformer of the GPT-2 kind, small enough to read and regular enough to cut into units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import HeteroError

_INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a :class:`GPT`.

    Args:
        vocabulary: number of tokens.
        context: longest sequence, in tokens; one learned position each.
        width: of the residual stream; a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads per block.
        mlp_width: hidden width of the MLP; ``None`` is 4 x ``width``.
        tied_embedding: whether the head is the token embedding.
        dropout: probability after embedding, attention and MLP.

    Raises:
        HeteroError: if a size is not positive, ``width`` is no multiple of ``heads``, or ``dropout`` is not a
            probability below 1.
    """

    vocabulary: int = 50257
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int | None = None
    tied_embedding: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "depth", "heads", "mlp_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeteroError(f"GPTConfig: {name} is {value}: give 1 or more")
        if self.width % self.heads:
            raise HeteroError(
                f"GPTConfig: width {self.width} is no multiple of {self.heads} heads: "
                f"give {self.width // self.heads * self.heads or self.heads} or other heads"
            )
        if not 0 <= self.dropout < 1:
            raise HeteroError(f"GPTConfig: dropout is {self.dropout}: give a probability, 0 up to below 1")


class GPT(nn.Module):
    """Token and position embedding, ``depth`` pre-norm blocks, a final norm and a head.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).

    Args:
        config: its sizes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()
        if config.tied_embedding:
            self.head.weight = self.embed.token.weight

    def reset_parameters(self) -> None:
        """Draw all weights as GPT-2 does: normal, and smaller where blocks add to the residual stream."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for output in (block.attention.out, block.mlp.down):
                nn.init.normal_(output.weight, std=_INIT_STD / (2 * self.config.depth) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: integers, shape (batch, sequence), sequence up to ``context``.

        Returns:
            Shape (batch, sequence, vocabulary).
        """
        hidden: Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Embedding(nn.Module):
    """Learned tokens plus learned positions: (batch, sequence) to (batch, sequence, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens`` at positions 0, 1, 2, ..."""
        length, context = tokens.shape[-1], self.position.num_embeddings
        if length > context:
            raise HeteroError(
                f"the sequence has {length} tokens and the model a context of {context}: shorten it or "
                f"build the model with context={length}"
            )
        positions = torch.arange(length, device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream of shape (batch, sequence, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what attention and MLP make of ``hidden``."""
        hidden = hidden + self.attention(self.norm1(hidden))
        transformed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return transformed


class CausalAttention(nn.Module):
    """Multi-head attention to this token and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend within each sequence; shape (batch, sequence, width) in and out."""
        batch, length, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        probability = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        projected: Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return projected


class MLP(nn.Module):
    """Two matrices with a GELU between, on each token alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.mlp_width or 4 * config.width
        self.up = nn.Linear(config.width, inner)
        self.down = nn.Linear(inner, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (batch, sequence, width) in and out."""
        activated = F.gelu(self.up(hidden), approximate="tanh")
        transformed: Tensor = self.dropout(self.down(activated))
        return transformed
