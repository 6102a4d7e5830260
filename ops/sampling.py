"""Draws new tokens one at a time: GPT.stream and GPT.generate, and what they refuse."""

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from base.configurator import UserError


def stream(
    model,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    n_tokens: int | None = None,
) -> Iterator[Tensor]:
    """Yields the next ids (B, 1) after idx (B, T), max_new_tokens times.

    temperature=0 is greedy; n_tokens: only ids below it are drawn. The state is kept, so that a
    token costs one step. A recurrent mixer goes on for ever; softmax sees the last block_size
    tokens; cosformer and learned positions end at block_size. Raises UserError, before a token is
    drawn, for a request that is not possible.
    """
    numbers = [value for value in (max_new_tokens, top_k, n_tokens) if value is not None]
    if min(numbers) < 1 or not 0 <= temperature < math.inf or not (top_p is None or 0 < top_p <= 1):
        raise UserError(
            "stream: max_new_tokens, top_k and n_tokens must be at least 1, temperature finite and not "
            "negative, top_p above 0 and at most 1"
        )
    check_prompt(model, idx, max_new_tokens)

    def draws(idx, start=0):
        B, T = idx.shape
        state = model.init_state(B, dtype=model.wte.weight.dtype, length=T + max_new_tokens)
        for _ in range(max_new_tokens):
            with torch.inference_mode():  # a token took 5% longer under no_grad
                x, state = model.features(idx, state, start)
                start += idx.shape[1]
                idx = draw(model.logits(x[:, -1])[:, :n_tokens], temperature, top_k, top_p)
            yield idx.clone()  # outside inference mode, so that the ids can be trained on

    return draws(idx)


def generate(model, idx: Tensor, max_new_tokens: int, *options, **named) -> Tensor:
    """idx (B, T) followed by the ids that `stream` draws, which takes the same options: (B, T +
    max_new_tokens)."""
    return torch.cat([idx, *stream(model, idx, max_new_tokens, *options, **named)], dim=1)


def most_new_tokens(model, length: int) -> float:
    """How many tokens the model can add to a prompt of `length` tokens; infinity if it can go on
    for ever."""
    ends = model.wpe is not None or any(
        block.mixer.past_block_size == "ends" for block in model.blocks
    )
    # one more than the positions that are left: the model never reads the last token it draws
    return max(0, model.config.block_size + 1 - length) if ends else math.inf


def check_prompt(model, idx: Tensor, max_new_tokens: int) -> None:
    """Raises UserError for a prompt that cannot be gone on from so far; warns if layers will forget
    tokens."""
    window, vocab_size, T = model.config.block_size, model.config.vocab_size, idx.shape[1]
    n_read = T + max_new_tokens - 1  # the last token that is drawn is not read
    if idx.numel() == 0:
        raise UserError("the prompt is empty: a sample needs at least one token to go on from")
    bad = [i for i in idx.flatten().tolist() if not 0 <= i < vocab_size]
    if bad:
        raise UserError(f"the prompt has token id {bad[0]}; the model knows 0 to {vocab_size - 1}")
    if max_new_tokens > most_new_tokens(model, T):
        raise UserError(
            f"position {n_read} is past block_size={window}, where its state ends: the prompt, of "
            f"{T} tokens, and max_new_tokens may have {window + 1} together"
        )
    if n_read > window and any(block.mixer.past_block_size == "rolls" for block in model.blocks):
        warnings.warn(
            f"past block_size={window} some layers see the last {window} tokens only", stacklevel=3
        )


def check_finite(logits: Tensor) -> None:
    """Raises UserError for logits that choose no token: argmax would take the first NaN for the
    largest."""
    # they are NaN where one is; isfinite over all of them took 8 times as long
    extremes = torch.stack(logits.aminmax())
    if not extremes.isfinite().all():
        raise UserError(
            "the model's logits are not finite: its weights are broken, or the run has diverged"
        )


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Draws ids (B, 1) from logits (B, V). temperature 0 takes the largest."""
    check_finite(logits)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # the largest logit becomes 0, so that no temperature, however low, turns it into an infinity
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:  # the smallest set of ids whose probabilities reach top_p
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # the likeliest id stays, even if float32 rounds a tiny top_p to 0
        logits = logits.scatter(
            -1, index, ordered.masked_fill((before >= top_p) & (before > 0), -torch.inf)
        )
    return torch.multinomial(logits.softmax(-1), 1)
