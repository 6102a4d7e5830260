"""Checks a request for new tokens, then draws them one at a time (GPT.stream)."""

from configurator import UserError

import math
import warnings

import torch


def most_new_tokens(model, length: int) -> float:
    """How many tokens the model can add to a prompt of `length` tokens; infinity if it can go on for ever."""
    ends = model.wpe is not None or any(block.mixer.past_block_size == "ends" for block in model.blocks)
    # one more than the positions that are left: the model never reads the last token it draws
    return max(0, model.config.block_size + 1 - length) if ends else math.inf


def check_request(
    model,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    n_tokens: int | None,
) -> None:
    """Raises UserError for a request that GPT.stream cannot meet; warns if layers will forget tokens."""
    window, end = model.config.block_size, idx.shape[1] + max_new_tokens
    if idx.numel() == 0:
        raise UserError("the prompt is empty: a sample needs at least one token to go on from")
    if int(idx.min()) < 0 or int(idx.max()) >= model.config.vocab_size:
        bad = next(i for i in idx.flatten().tolist() if not 0 <= i < model.config.vocab_size)
        raise UserError(f"the prompt has token id {bad}; the model knows 0 to {model.config.vocab_size - 1}")
    for name, value, allowed, is_right in (
        ("max_new_tokens", max_new_tokens, "at least 1", max_new_tokens >= 1),
        ("temperature", temperature, "at least 0, and finite", 0 <= temperature < math.inf),
        ("top_k", top_k, "at least 1, or None", top_k is None or top_k >= 1),
        ("top_p", top_p, "above 0 and at most 1, or None", top_p is None or 0 < top_p <= 1),
        ("n_tokens", n_tokens, "at least 1, or None", n_tokens is None or n_tokens >= 1),
    ):
        if not is_right:
            raise UserError(f"{name}={value}: must be {allowed}")
    names = {
        block.mixer.past_block_size: name for block, (name, _) in zip(model.blocks, model.config.layers(), strict=True)
    }
    ending, rolling, most = names.get("ends"), names.get("rolls"), most_new_tokens(model, idx.shape[1])
    if max_new_tokens > most:
        works = f"max_new_tokens={most} works" if most else f"shorten the prompt, of {idx.shape[1]} tokens"
        if model.wpe is not None:
            raise UserError(f"position='learned': there is no embedding past block_size={window}; {works}")
        raise UserError(f"{ending}: position {end - 1} is past block_size={window}, where its state ends; {works}")
    if end > window and rolling:
        warnings.warn(f"past block_size={window} {rolling} layers see the last {window} tokens only", stacklevel=3)


def check_finite(logits: torch.Tensor) -> None:
    """Raises UserError for logits that choose no token: argmax would take the first NaN for the largest."""
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite: its weights are broken, or the run has diverged")


def draw(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
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
        logits = logits.scatter(-1, index, ordered.masked_fill((before >= top_p) & (before > 0), -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1)
