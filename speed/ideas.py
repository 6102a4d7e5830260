"""Ideas of other speed runs that no key has: each is an edit of the GPT, or of the sizes of a step's
batch, that a recipe of the gate run (gaterun.py) may name.

An edit that pays becomes a key or a class; the others stay here with their rows
(results/gaterun/README.md).
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import model
from keys import TrainConfig
from model import GPT, MLP, Softmax, token_losses


class ReLUSquared(MLP):
    """relu(x)^2 in the MLP (So et al. 2021, Primer)."""

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class HalfRoPE(Softmax):
    """RoPE turns half of a head's channels (modded-nanogpt)."""

    rope_fraction = 0.5


class ValueEmbedded(Softmax):
    """Each token id adds a row of a table to its values (modded-nanogpt). GPT's subclass below
    hands it the ids."""

    def __init__(self, config, gate):
        super().__init__(config, gate)
        self.of_ids = nn.Embedding(config.vocab_size, config.n_embd)
        self.ids = torch.zeros(0)

    def project(self, x, state, start, document=None):
        p = super().project(x, state, start, document)
        added = self.of_ids(self.ids).unflatten(-1, p.v.shape[-2:])  # (B, T, H, D)
        return p.replace(v=p.v + added)


class ValueEmbeddings(GPT):
    def features(self, idx, *options, **named):
        for block in self.blocks:
            block.mixer.ids = idx
        return super().features(idx, *options, **named)


class ValueResidual(GPT):
    """Values of later layers are the mean of their own and the first layer's (Zhou et al. 2024)."""

    def __init__(self, config):
        super().__init__(config)
        first, *later = [block.mixer for block in self.blocks]
        for mixer in later:
            mixer.first = [first]  # in a list, or it would be a part of this module


class ResidualValues(Softmax):
    """The mixer of ValueResidual, which sets `first` in every layer but the first."""

    first: list = []

    def project(self, x, state, start, document=None):
        p = super().project(x, state, start, document)
        if self.first:
            p = p.replace(v=0.5 * (p.v + self.first[0].values))
        self.values = p.v
        return p


class FirstAgain(GPT):
    """Each block gets the embedding again, times a trained number that starts at 0
    (modded-nanogpt)."""

    def __init__(self, config):
        super().__init__(config)
        self.again = nn.Parameter(torch.zeros(config.n_layer))

    def features(self, idx, state=None, start=0, document=None):
        x = first = self.wte(idx) + self.ngrams(idx)
        for block, share in zip(self.blocks, self.again, strict=True):
            x = block(x + share * first)
        return self.norm(x), state


class SoftCappedLogits(GPT):
    """Logits 15 tanh(logit / 15) (Gemma 2, modded-nanogpt)."""

    def logits(self, x):
        return 15 * torch.tanh(super().logits(x) / 15)

    def loss(self, x, targets):
        return token_losses(self.logits(x), targets).sum()


class HeadFromZero(GPT):
    """The output layer starts at zero; for tie_embeddings=false (modded-nanogpt)."""

    def init_weights(self, seed):
        super().init_weights(seed)
        nn.init.zeros_(self.head.weight)


GPTS: dict[str, type[GPT]] = {  # {recipe: its class}
    "value embeddings": ValueEmbeddings,
    "two layers and a value residual": ValueResidual,
    "two layers and the embedding again": FirstAgain,
    "soft-capped logits": SoftCappedLogits,
    "an output layer of its own from zero": HeadFromZero,
}


def short_first(step: int, config: TrainConfig) -> tuple[int, int]:
    """(rows, their tokens): as many tokens a step as ever, in rows of 32 for the first 40%."""
    if step < 0.4 * config.max_iters:
        return 2 * config.batch_size, config.block_size // 2
    return config.batch_size, config.block_size


def growing_batch(step: int, config: TrainConfig) -> tuple[int, int]:
    """(rows, their tokens): half of the rows, all, and one and a half, a third of the steps each."""
    third = 3 * step // config.max_iters
    return config.batch_size * (1 + third) // 2, config.block_size


SIZES: dict[str, Callable] = {  # {recipe: (step, config) -> sizes of its batch}
    "32 tokens first": short_first,
    "a growing batch": growing_batch,
}


def register() -> None:
    """Makes the classes above known by their names, in this process."""
    model.MLPS["relu_squared"] = ReLUSquared
    model.MIXERS["half_rope"] = HalfRoPE
    model.MIXERS["value_embedded"] = ValueEmbedded
    model.MIXERS["residual_values"] = ResidualValues
