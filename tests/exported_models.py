"""Small models of many kinds, for tests of chains out of exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.dropout = nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Dropout, a tensor that is no buffer, one made in the forward, and random numbers that are not used."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.Sequential(*(Block(6, dropout) for _ in range(3)))
        self.plain = torch.arange(6, dtype=torch.float64)
        self.position = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x) + self.plain
        torch.rand(3)
        h += self.position
        h = self.blocks(h + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device))
        return self.head(h) + torch.arange(2, device=x.device)


class Outputs(NamedTuple):
    first: Tensor
    others: list[Any]


@dataclass
class Pair:
    one: Tensor
    other: Outputs


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Masked(nn.Module):
    """A mask that every block uses, keyword arguments, a dict of tensors, and outputs in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Attention(6) for _ in range(2))

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, bias: dict[str, Tensor] | None = None, scale: float = 1.0
    ) -> dict[str, Any]:
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        seen = causal if mask is None else causal & (mask[:, None, :] > 0)
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h, seen) * scale
        if bias is not None:
            h = h + bias["hidden"][:, None]
        return {"logits": self.head(h), "more": [h.mean(1), h]}


class Containers(Masked):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        return Pair(outputs["logits"], Outputs(outputs["more"][0], [None, 3]))


class Tied(nn.Module):
    """An embedding that is the head too, and a layer that is used twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.second = self.first
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = self.first(h).relu()
        h = self.second(self.norm(h)).relu()
        return self.head(h)


class Moving(nn.Module):
    """Buffers that the forward changes in several ways, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.shared, self.bare = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("assigned", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bare(self.a(x))
        h = self.shared(self.b(h))
        h = self.shared(self.c(h)).relu_()
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0))
            self.calls += 1
            self.assigned = 0.9 * self.assigned + h.detach().mean(0)
        h = h - self.mean / self.assigned
        h[:, 0] = 1
        return self.d(h)


class TwoHeads(nn.Module):
    """Other outputs in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).relu()
        one, two = self.one(h), self.two(h)
        return (one, two) if self.training else (one + two) / 2


def resnet() -> nn.Module:
    return timm.models.ResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=5, channels=(4, 4, 8, 8))


def convnext() -> nn.Module:
    return timm.models.ConvNeXt(depths=(1, 1, 1, 2), dims=(4, 4, 8, 8), num_classes=5, drop_path_rate=0.2)


def mixer() -> nn.Module:
    return timm.models.MlpMixer(img_size=8, patch_size=4, num_blocks=2, embed_dim=8, num_classes=5, drop_rate=0.1)


def swin() -> nn.Module:
    shape = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 4, "depths": (2,), "num_heads": (2,)}
    return timm.models.SwinTransformer(**shape, num_classes=5)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


class Branches(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.head(x)


class Single(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).relu()


class Overwrites(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.mul_(2)))


class Switches(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) if self.training else self.head(x)


class Silent(Loss):
    def forward(self, x: Tensor) -> int:
        self.head(self.body(x))
        return 3


class Anyhow(Loss):
    def forward(self, x: Tensor, /, scale: float = 1.0, *more: Tensor, shift: float = 0.0, **others: Tensor) -> Tensor:
        return self.head(self.body(x * scale) + sum(more) + others["last"] + shift)
