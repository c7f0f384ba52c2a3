"""A small GPT in PyTorch, its text, and its optimizers. Nothing here knows of sites."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 64, 4, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats, of predicting tokens from those before.

        The tokens are int64 [batch, length + 1].
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1])
        x = self.token(inputs) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizers(model: GPT) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for all else."""
    hidden = [x for x in model.blocks.parameters() if x.ndim == 2]
    inside = {id(x) for x in hidden}
    rest = [x for x in model.parameters() if id(x) not in inside]
    return [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Text:
    """The source files of Python's standard library, as bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        whole = b"\0".join(file.read_bytes() for file in files)
        tokens = np.frombuffer(whole, np.uint8)
        self._training, self._held_out = np.split(tokens, [int(0.95 * len(tokens))])

    def batch(self, seed: tuple[int, ...], size: int = 16) -> np.ndarray:
        """int64 [size, LENGTH + 1], the same for the same seed."""
        return self._crops(self._training, np.random.default_rng(seed), size)

    def held_out(self, size: int = 128) -> np.ndarray:
        return self._crops(self._held_out, np.random.default_rng(0), size)

    def _crops(self, tokens, rng, size: int) -> np.ndarray:
        starts = rng.integers(0, len(tokens) - LENGTH - 1, size)
        return np.stack([tokens[x : x + LENGTH + 1] for x in starts]).astype(np.int64)
