"""Log-linear states: the form by chunks, and a mixer that has it, is the definition in outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from small_models import off_its_start
from test_recurrence import B, H, every_rule, every_shape
from test_recurrence import make_inputs as recurrence_inputs

from model import GPT, MIXERS, GPTConfig
from ops.levels import Levels, chunked, factors
from ops.recurrence import quadratic

SMALL = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=9)


def make_inputs(T, kind, delta, n_levels):
    inputs = recurrence_inputs(T, kind, "-5 to 0 a step", delta) | {"levels": torch.rand(B, T, H, n_levels).double()}
    return {name: x for name, x in inputs.items() if name != "initial_state"}


def blocks_of(t):
    """{token: level} of the past of token t: blocks by the powers of two in t, the largest first; t itself is 0."""
    place, levels = 0, {t: 0}
    for level in range(t.bit_length(), 0, -1):
        size = 2 ** (level - 1)
        if t & size:
            levels |= dict.fromkeys(range(place, place + size), level)
            place += size
    return levels


def definition(q, k, v, *, levels, log_decay, beta, erase):
    T, last = q.shape[1], levels.shape[-1] - 1
    factor = levels.new_zeros(B, H, T, T)
    for t in range(T):
        for s, level in blocks_of(t).items():
            factor[:, :, t, s] = levels[:, t, :, min(level, last)]
    weights = quadratic(q, k, log_decay=log_decay, beta=beta, erase=erase) * factor
    return torch.einsum("bhij,bjhv->bihv", weights, v), factor


def gradients(form, inputs, **options):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    o, _ = form(**dict.fromkeys(inputs) | leaves, **options)
    torch.manual_seed(1)
    return [o, *torch.autograd.grad((o * torch.randn_like(o)).sum(), list(leaves.values()))]


def assert_close(a, b, limit=1e-10):
    assert all((x - y).abs().max() < limit for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("T", "n_levels"), [(1, 2), (37, 7), (64, 7), (100, 4)])  # the last: past the last level
@every_shape
@every_rule
def test_any_size_of_chunks_gives_the_definition_with_every_gradient(T, n_levels, kind, delta):
    inputs = make_inputs(T, kind, delta, n_levels)
    expected = gradients(definition, inputs)
    assert_close([factors(inputs["levels"].transpose(1, 2))], [definition(**inputs)[1]])
    for chunk_size in (8, 32):
        assert_close(gradients(chunked, inputs, chunk_size=chunk_size), expected)


@every_shape
@every_rule
@pytest.mark.parametrize("n_levels", [8, 4])
def test_a_text_in_pieces_gives_the_same_readout_and_states(kind, delta, n_levels):
    inputs = make_inputs(100, kind, delta, n_levels)
    expected, states, start, parts = *chunked(**inputs), 0, []
    S = None
    for n in (3, 1, 1, 30, 0, 1, 1, 1, 1, 1, 60):
        piece = {name: None if x is None else x[:, start : start + n] for name, x in inputs.items()}
        o, S = chunked(**piece, initial_state=S, start=start)
        parts, start = [*parts, o], start + n
    assert_close((torch.cat(parts, 1), S), (expected, states))


def test_bfloat16_and_autocast_change_nothing():
    inputs = {name: x.bfloat16() for name, x in make_inputs(50, "per head", "erase", 7).items()}
    exact = gradients(chunked, {name: x.float() for name, x in inputs.items()})
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients(chunked, inputs)
    assert results[0].dtype == torch.float32
    assert all((x - y).norm() < 1e-2 * y.norm() for x, y in zip(results, exact, strict=True))


def make_mixer(name, **keys):
    return off_its_start(GPTConfig(**SMALL, attention=name, **keys), noise=0.3).blocks[0].mixer


@pytest.mark.parametrize("name", [name for name in MIXERS if MIXERS[name].has_levels])
def test_the_lambda_of_a_mixer_starts_near_softplus_of_zero_and_at_one_it_is_the_mixer_without(name):
    mixer, without, x = make_mixer(name, levels="log_linear"), make_mixer(name), torch.randn(2, 16, 16).double()
    assert len(without.load_state_dict(mixer.state_dict(), strict=False).unexpected_keys) == 2
    assert mixer.levels(x * 0, 0).sub(0.6931472).abs().max() < 1e-6
    start = GPT(GPTConfig(**SMALL, attention=name, levels="log_linear")).blocks[0].mixer.levels
    assert (start.scale == 1).all()  # and lambda is softplus(W x)
    assert torch.equal(start(x.float(), 0).flatten(2), F.softplus(start.proj(x.float())))
    mixer.levels.forward = lambda x, start, document: torch.ones(*x.shape[:2], mixer.n_head, 5).double()
    assert (mixer(x) - without(x)).abs().max() < 1e-12


def test_merged_levels_are_the_blocks_of_the_text_with_the_token():
    """Token t reads the blocks of t + 1 by powers of two: the 8 tokens up to token 7 are one."""
    levels = Levels(GPTConfig(**SMALL, attention="cosformer", levels="merged"), 2)
    x = torch.randn(1, 16, 16)
    share = levels.proj(x).unflatten(-1, (2, 5)).softmax(-1)  # (1, T, H, L)
    factor = factors(levels(x, 0).transpose(1, 2))[0]
    assert (levels(x[:, 5:], 5) - levels(x, 0)[:, 5:]).abs().max() < 1e-6
    for t in range(16):
        for s, level in blocks_of(t + 1).items():
            if s <= t:
                assert torch.equal(factor[:, t, s], share[0, t, :, min(level, 4)])
