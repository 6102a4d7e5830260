"""Log-linear attention (Guo et al. 2025): the recurrence with a state for each of log2(T) blocks of
the past.

    o_t = sum_s lambda_t^level(t, s) w_ts v_s        w: recurrence.quadratic; level(t, s) = bit_length(t xor s)

Level 0 is the token itself, and level l a block of 2^(l - 1) tokens, if t has this power of two:
the past of token 13 = 8 + 4 + 1 is the tokens 0 to 7 (level 4), 8 to 11 (level 3) and 12 (level 1).
With all lambda at one it is the plain recurrence. The last level has no end: it also takes what
would be of a higher one.

    factors     lambda_t^level(t, s) as a matrix: the definition is quadratic's weights times these
    chunked     blocks that double; cached decoding reads a block of one token, and the states are a Fenwick tree

chunked returns o and the states (B, H, L - 1, Dk, Dv) of levels 1, 2, ..., and takes the arguments
of recurrence.py; initial_state has the shape of the states, and there are

    levels      lambda (B, T, H, L)
    start       position of the first token
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ops.documents import Documents
from ops.fast import Inverse, at_least_float32, product
from ops.recurrence import prepare, to_chunks, weights


def level_of(t: Tensor, s: Tensor) -> Tensor:
    """bit_length(t xor s), for positions below 2^31."""
    return ((t ^ s)[..., None] >> torch.arange(31, device=t.device)).sign().sum(-1)


def factors(levels: Tensor) -> Tensor:
    """lambda (..., T, L) of a text, or of a block that begins at a multiple of a power of two of at
    least T -> the factor of each weight, (..., T, T); zero above the diagonal."""
    T, L = levels.shape[-2:]
    i = torch.arange(T, device=levels.device)
    level = level_of(i[:, None], i).clamp(max=L - 1)
    return levels.gather(-1, level.expand(*levels.shape[:-2], T, T)).tril()


def chunked(
    q,
    k,
    v,
    *,
    levels,
    log_decay=None,
    beta=None,
    erase=None,
    initial_state=None,
    start: int = 0,
    chunk_size: int = 32,
):
    """Block by block: a text that begins at `start` consists of few blocks whose place is a
    multiple of their size."""
    *inputs, S = prepare(q, k, v, log_decay, beta, erase, initial_state, levels.shape[-1] - 1)
    outputs = [S[:, :, 0, :0]]
    states = [None, *S.unbind(2)]  # level 0 has no state
    last = len(states) - 1
    first = start  # of the block
    end = start + q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        while first < end:
            # 1. the largest block whose size, a power of two, divides its place
            size = 1 << (end - first).bit_length() - 1
            if first:
                size = min(size, first & -first)
            part = slice(first - start, first - start + size)
            of_block = [x if x is None else x[:, part] for x in (levels, *inputs)]
            o, new, read, through = _block(chunk_size, *of_block)
            first += size
            # 2. it reads the blocks of the past, and changes their states. Those that it completes to
            # a larger one, up to the level of where it ends, become one block with it
            level_of_sum = min((first & -first).bit_length(), last)
            for level in range(1, last + 1):
                n_blocks = (first - size) >> (level - 1)  # of this level's size, before this block
                holds_a_block = n_blocks % 2 == 1 or (level == last and n_blocks > 0)
                if not holds_a_block:
                    continue
                factor = levels[:, part, :, level, None].transpose(1, 2)
                o = o + factor * product(read, states[level])
                states[level] = _times(through, states[level])
                if level <= level_of_sum:
                    new = new + states[level]
                    states[level] = torch.zeros_like(new)
            states[level_of_sum] = new
            outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2), torch.stack(states[1:], 2)


def _block(chunk_size, levels, q, k, v, log_decay, beta, erase):
    """A block (B, n, H, D) of a power of two of tokens, as if the text began with it. Returns

    o (B, H, n, Dv); its state (B, H, Dk, Dv); what its queries read of the state before it (B, H,
    n, Dk); and what the block does to that state: a factor (B, H, 1 or Dk, 1), or with the delta
    rule a matrix (B, H, Dk, Dk).
    """
    # 1. the chunks, all at once: (B, H, N, C, D)
    size = min(chunk_size, q.shape[1])
    levels, q, k, v, log_decay, beta, erase = (
        to_chunks(x, size) for x in (levels, q, k, v, log_decay, beta, erase)
    )
    inside, read, k_to_end, through = weights(q, k, log_decay)
    write = k_to_end.mT
    if beta is not None:
        u, from_start, _, _ = weights(k if erase is None else erase, k, log_decay)
        inverse = Inverse.call((u * beta).tril(-1)) * beta.mT
        inside, write = product(inside, inverse), product(write, inverse)
        read = read - product(inside, from_start)
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        through = through * eye - product(write, from_start)
    o, state = product(inside * factors(levels), v), product(write, v)
    read = read.expand(*o.shape[:-1], -1)
    # 2. two neighbours become one: the right one reads the left one's state, at one level
    while o.shape[2] > 1:
        level = min(size.bit_length(), levels.shape[-1] - 1)
        # each (B, H, N, ...) -> the left and the right ones (B, H, N / 2, ...)
        o_left, o_right = _pairs(o)
        read_left, read_right = _pairs(read)
        S_left, S_right = _pairs(state)
        left, right = _pairs(through)
        _, lambda_right = _pairs(levels[..., level : level + 1])
        o_right = torch.addcmul(o_right, lambda_right, product(read_right, S_left))
        # what the right one reads of the state before both has gone through the left one
        read_right = read_right * left.mT if left.shape[-1] == 1 else product(read_right, left)
        o = torch.cat([o_left, o_right], 3)
        read = torch.cat([read_left, read_right], 3)
        state = S_right + _times(right, S_left)
        through = _times(right, left)
        levels = levels.unflatten(2, (-1, 2)).flatten(3, 4)
        size = 2 * size
    return o[:, :, 0], state[:, :, 0], read[:, :, 0], through[:, :, 0]


def _pairs(x):
    """The first, third, ... block of x (B, H, N, ...), and the second, fourth, ...: views."""
    return x.unflatten(2, (-1, 2)).unbind(3)


def _times(through, S):
    """What a block makes of a state, or of what an earlier block does."""
    return through * S if through.shape[-1] == 1 else product(through, S)


class Levels(nn.Module):
    """x (B, T, C) -> how much of each level a token reads, lambda (B, T, H, L) > 0.

    log_linear: softplus(scale W x), about 0.69 at the start (Guo et al. 2025). merged: softmax(W x)
    over the levels, and blocks are merged before the token reads: token 7, which completes a block
    of 8, reads its past as one block and not as four.
    """

    def __init__(self, config, n_head):
        super().__init__()
        self.n_levels = max(2, 1 + (config.block_size - 1).bit_length())
        self.is_merged = config.levels == "merged"
        self.proj = nn.Linear(config.n_embd, n_head * self.n_levels, bias=False)
        self.scale = None
        if not self.is_merged:
            self.scale = nn.Parameter(torch.empty(n_head * self.n_levels))

    def init_parameter(self, name, start, generator):
        start.fill_(1.0)

    def forward(self, x: Tensor, start: int, document: Documents | None = None) -> Tensor:
        y = at_least_float32(self.proj(x))
        if not self.is_merged:
            return F.softplus(self.scale * y).unflatten(-1, (-1, self.n_levels))
        y = y.unflatten(-1, (-1, self.n_levels)).softmax(-1)
        # the levels up to the one that the token completes are read as that one
        end = torch.arange(start + 1, start + 1 + x.shape[1], device=x.device)
        if document is not None:
            end = document.position + 1
        end = end[..., None, None]
        level = torch.arange(self.n_levels, device=x.device)
        completed = level_of(end, end - 1)  # (T, 1, 1), or (B, T, 1, 1)
        level = level.maximum(completed).clamp(max=self.n_levels - 1)  # (..., T, 1, L)
        return y.gather(-1, level.expand_as(y))
