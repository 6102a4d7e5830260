"""The forms of the recurrence agree, with one another and with the definition, in outputs, final state and gradients.

python -m pytest tests/test_recurrence.py
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from ops import fast
from ops.recurrence import (
    LOG_DECAY_MIN,
    chunked,
    fla,
    has_fla,
    plain_chunked,
    quadratic,
    recurrent,
)

B, H, DK, DV = 2, 3, 8, 5
LENGTHS = (1, 2, 17, 63, 64, 65, 200)
CHUNKS = (None, 1, 16, 64)
# what a decay can be: what a mixer makes of logits from -40 to 40, none at all, and one that forgets everything
DECAYS = {
    "logits from -40 to 40": lambda shape: F.logsigmoid(torch.rand(shape).double() * 80 - 40),
    "0 a step": lambda shape: torch.zeros(shape).double(),
    "-5 to 0 a step": lambda shape: -5 * torch.rand(shape).double(),
    "-20 a step": lambda shape: torch.full(shape, -20.0).double(),
    "-20 or 0, at random": lambda shape: -20.0 * (torch.rand(shape) < 0.5).double(),
}
STRONG_DECAYS = {
    "-50 to -200 or 0, at random": lambda shape: (torch.rand(shape) < 0.2) * (-50 - 150 * torch.rand(shape)).double(),
    "-1000 or -0.1, at random": lambda shape: torch.where(torch.rand(shape) < 0.3, -1000.0, -0.1).double(),
    "-inf or -0.1, at random": lambda shape: torch.where(torch.rand(shape) < 0.3, -torch.inf, -0.1).double(),
}
KINDS = [("none", None), *itertools.product(("per head", "per channel"), DECAYS)]
IDS = ["no decay", *(f"{kind}, {name}" for kind, name in KINDS[1:])]
every_kind = pytest.mark.parametrize(("kind", "decay"), KINDS, ids=IDS)
with_and_without_the_delta_rule = pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta rule"])


def make_inputs(T, kind, decay, delta, dtype=torch.float64, seed=0):
    """Arguments of the forms by name: random, with the decays and the delta rule that are asked for."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(B, T, H, DK).double(), torch.randn(B, T, H, DK).double(), torch.randn(B, T, H, DV).double()
    k = F.normalize(k, dim=-1) if delta else k
    log_decay = None
    if kind != "none":
        log_decay = (DECAYS | STRONG_DECAYS)[decay]((B, T, H) if kind == "per head" else (B, T, H, DK))
    beta = torch.rand(B, T, H).double() if delta else None
    state = torch.randn(B, H, DK, DV).double()
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "initial_state": state}
    return {name: None if x is None else x.to(dtype) for name, x in named.items()}


def run(form, inputs, **options):
    """Outputs, final state, and for every input the gradient of a random weighting of both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x is not None}
    o, state = form(**leaves, **options)
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape).to(o)).sum() + (state * torch.randn(state.shape).to(state)).sum()
    return {"o": o, "state": state} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def error(x, reference):
    """Relative, in norm. Where the reference itself is below 1e-2 (the gradient of a log-decay of -20 a step is a
    sum of terms of size 1 that cancel to exp(-20)), relative to that."""
    return (x.double() - reference.double()).norm().item() / max(1e-2, reference.double().norm().item())


@pytest.mark.parametrize("T", LENGTHS)
@every_kind
@with_and_without_the_delta_rule
def test_chunked_equals_recurrent_with_every_gradient(T, kind, decay, delta):
    inputs = make_inputs(T, kind, decay, delta)
    expected = run(recurrent, inputs)
    for chunk_size in CHUNKS:
        for name, x in run(chunked, inputs, chunk_size=chunk_size).items():
            assert x.isfinite().all() and error(x, expected[name]) < 1e-10, (name, chunk_size)


@every_kind
@with_and_without_the_delta_rule
def test_the_plain_chunked_form_equals_recurrent_with_every_gradient(kind, decay, delta):
    for T, chunk_size in ((1, 16), (65, 16), (100, 64)):
        inputs = make_inputs(T, kind, decay, delta)
        expected = run(recurrent, inputs)
        for name, x in run(plain_chunked, inputs, chunk_size=chunk_size).items():
            assert x.isfinite().all() and error(x, expected[name]) < 1e-10, (name, T, chunk_size)


def test_the_weights_of_doubled_blocks_are_those_of_the_plain_form():
    q, k, log_decay = torch.randn(3, 2, 16, DK).double().unbind()
    c = (-log_decay.abs()).cumsum(1)
    decays = (c[:, :, None] - c[:, None]).exp()  # (M, C, C, Dk)
    expected = (q[:, :, None] * k[:, None] * decays).sum(-1).tril(), q * c.exp(), k * (c[:, -1:] - c).exp()
    outputs = fast.ChannelWeights.apply(q, k, -log_decay.abs())
    for x, reference in zip(outputs, (*expected, c[:, -1:].exp()), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-12, atol=1e-12)


def test_the_inverse_of_doubled_blocks_is_that_of_the_solver():
    L = torch.randn(2, 3, 32, 32).double().tril(-1) / 4
    eye = torch.eye(32).double().expand_as(L)
    expected = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    torch.testing.assert_close(fast.Inverse.apply(L), expected, rtol=1e-10, atol=1e-10)


@every_kind
@with_and_without_the_delta_rule
def test_explicit_weights_reproduce_the_output(kind, decay, delta):
    for T in LENGTHS:
        inputs = make_inputs(T, kind, decay, delta) | {"initial_state": None}
        o, _ = recurrent(**inputs)
        weights = quadratic(inputs["q"], inputs["k"], log_decay=inputs["log_decay"], beta=inputs["beta"])
        assert error(torch.einsum("bhij,bjhv->bihv", weights, inputs["v"]), o) < 1e-10
        assert not weights.triu(1).any()


@every_kind
@with_and_without_the_delta_rule
def test_recurrent_is_the_equation_written_in_loops(kind, decay, delta):
    inputs = make_inputs(5, kind, decay, delta)
    o, final = recurrent(**inputs)
    plain = {name: None if x is None else x.tolist() for name, x in inputs.items()}
    for b, h in itertools.product(range(B), range(H)):
        S = [row[:] for row in plain["initial_state"][b][h]]
        for t in range(5):
            q, k, v = (plain[name][b][t][h] for name in "qkv")
            logs = plain["log_decay"][b][t][h] if plain["log_decay"] else 0.0
            a = [math.exp(x) for x in (logs if isinstance(logs, list) else [logs] * DK)]
            S = [[a[i] * S[i][j] for j in range(DV)] for i in range(DK)]
            if delta:
                held = [sum(S[i][j] * k[i] for i in range(DK)) for j in range(DV)]
                v = [plain["beta"][b][t][h] * (v[j] - held[j]) for j in range(DV)]
            S = [[S[i][j] + k[i] * v[j] for j in range(DV)] for i in range(DK)]
            expected = [sum(q[i] * S[i][j] for i in range(DK)) for j in range(DV)]
            torch.testing.assert_close(o[b, t, h], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[b, h], torch.tensor(S, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "decay"), [*KINDS, *itertools.product(("per head", "per channel"), STRONG_DECAYS)])
@with_and_without_the_delta_rule
def test_float32_stays_near_float64(kind, decay, delta):
    """Stated error ratio 2e-5 (measured: 2e-7 without decay; 1e-5 with log-decays to -40, whose sums lose digits)."""
    inputs = make_inputs(200, kind, decay, delta)
    expected = run(recurrent, inputs)
    rounded = {name: None if x is None else x.float() for name, x in inputs.items()}
    for name, x in run(chunked, rounded).items():
        assert x.dtype == torch.float32
        if expected[name].norm() > 1e-3:  # what rests on exp(-20) alone is below float32's reach
            assert error(x, expected[name]) < 2e-5, name


@every_kind
@with_and_without_the_delta_rule
def test_bfloat16_inputs_are_computed_in_float32(kind, decay, delta):
    inputs = make_inputs(100, kind, decay, delta, dtype=torch.bfloat16)
    o, state = chunked(**inputs)
    expected, _ = recurrent(**{name: None if x is None else x.double() for name, x in inputs.items()})
    assert o.dtype == state.dtype == torch.float32 and error(o, expected) < 2e-5


def explicit(initial_state, **inputs):
    """The third form with the signature of the others; it starts from an empty state."""
    return (quadratic(**inputs),)


@pytest.mark.parametrize("form", [recurrent, chunked, explicit])
@every_kind
@with_and_without_the_delta_rule
def test_autocast_changes_nothing_forward_or_backward(form, kind, decay, delta):
    inputs = make_inputs(70, kind, decay, delta, dtype=torch.float32)
    if form is explicit:
        inputs["initial_state"] = None
    leaves = [
        x.requires_grad_() for name, x in inputs.items() if x is not None and not (form is explicit and name == "v")
    ]

    def results():
        outputs = form(**inputs)
        return *outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    for x, reference in zip(found, expected, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, reference)


@pytest.mark.parametrize("kind", ["per head", "per channel"])
@with_and_without_the_delta_rule
def test_an_output_is_bit_equal_whatever_decays_follow_or_stand_in_other_rows(kind, delta):
    mild = make_inputs(32, kind, "-5 to 0 a step", delta, dtype=torch.float32)
    strong = mild | {"log_decay": mild["log_decay"].clone()}
    strong["log_decay"][:, 20:] *= 10
    mixed = mild | {"log_decay": torch.stack([mild["log_decay"][0], strong["log_decay"][1]])}
    expected, _ = chunked(**mild)
    assert torch.equal(chunked(**strong)[0][:, :20], expected[:, :20])
    assert torch.equal(chunked(**mixed)[0][0], expected[0])


@pytest.mark.parametrize("step", [-2.0, -3.0, -10.0, -50.0])
@with_and_without_the_delta_rule
def test_float32_is_finite_and_near_float64_however_far_a_channel_decays(step, delta):
    """Chunks over which a decay stays above, gets to and falls below float32's smallest number. The gradient of a
    log-decay is a difference of larger terms: 2e-4 there, 2e-6 else."""
    inputs = make_inputs(96, "per channel", "0 a step", delta)
    inputs["log_decay"] += step * torch.rand(inputs["log_decay"].shape)
    expected = run(recurrent, inputs)
    rounded = {name: x if x is None else x.float() for name, x in inputs.items()}
    for name, x in run(chunked, rounded, chunk_size=32).items():
        limit = 2e-4 if name == "log_decay" else 2e-6
        assert x.isfinite().all() and error(x, expected[name]) < limit, name


@pytest.mark.parametrize("decay", ["-5 to 0 a step", "-20 or 0, at random"])
@pytest.mark.parametrize("kind", ["none", "per head", "per channel"])
@pytest.mark.parametrize("chunk_size", [2, 8])
@with_and_without_the_delta_rule
def test_gradcheck(kind, decay, chunk_size, delta):
    """Outputs and final state, for every input of a row: over chunks, the last one padded, and inside one chunk."""
    inputs = {name: x[:1] for name, x in make_inputs(5, kind, decay, delta).items() if x is not None}

    def form(*values):
        return chunked(**dict(zip(inputs, values, strict=True)), chunk_size=chunk_size)

    assert torch.autograd.gradcheck(form, [x.requires_grad_() for x in inputs.values()])


def definition(q, k, v, *, log_decay=None, beta=None, initial_state):
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = q_t^T S_t; with beta v_t := beta_t (v_t - (a_t S_{t-1})^T k_t) first."""
    S, outputs = initial_state, []
    for t in range(q.shape[1]):
        if log_decay is not None:
            a = log_decay[:, t].exp()
            S = torch.einsum("bhkv,bhk->bhkv" if a.dim() == 3 else "bhkv,bh->bhkv", S, a)
        new = v[:, t]
        if beta is not None:
            new = torch.einsum("bh,bhv->bhv", beta[:, t], new - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


@pytest.mark.parametrize(
    ("kind", "decay", "beta"),
    [
        ("none", None, "up to 2"),
        ("none", None, 2.0),
        ("per head", "-50 to -200 or 0, at random", None),
        ("per head", "-50 to -200 or 0, at random", 1.0),
        ("per head", "-inf or -0.1, at random", 2.0),
        ("per head", "-5 to 0 a step", 0.0),
        ("per channel", "-50 to -200 or 0, at random", None),
        ("per channel", "-50 to -200 or 0, at random", "up to 2"),
        ("per channel", "-inf or -0.1, at random", 2.0),
    ],
)
def test_a_long_text_is_the_definition_in_every_form(kind, decay, beta):
    """2,000 tokens, 500 for the weights. float32 measured 5e-6 with reflections alone (beta 2), 1.3e-5 with -inf."""
    inputs = {name: x if x is None else x[:1] for name, x in make_inputs(2000, kind, decay, beta is not None).items()}
    if beta == "up to 2":
        inputs["beta"] *= 2
    elif beta is not None:
        inputs["beta"].fill_(beta)
    expected = run(definition, inputs)
    for name, x in run(chunked, inputs).items():
        assert x.isfinite().all() and error(x, expected[name]) < 1e-9, name
    rounded = {name: None if x is None else x.float() for name, x in inputs.items()}
    for name, x in run(chunked, rounded).items():
        assert error(x, expected[name]) < 2e-5, name
    with torch.no_grad():
        for x, name in zip(recurrent(**inputs), ("o", "state"), strict=True):
            assert error(x, expected[name]) < 1e-9, name
        start = {name: x if x is None else x[:, :500] for name, x in inputs.items()}
        start["initial_state"] = torch.zeros_like(inputs["initial_state"])
        weights = quadratic(start["q"], start["k"], log_decay=start["log_decay"], beta=start["beta"])
        assert error(torch.einsum("bhij,bjhv->bihv", weights, start["v"]), definition(**start)[0]) < 1e-9


@pytest.mark.parametrize("form", [chunked, recurrent])
@pytest.mark.parametrize("kind", ["per head", "per channel"])
@with_and_without_the_delta_rule
def test_a_decay_of_minus_infinity_forgets_and_has_no_gradient(form, kind, delta):
    inputs = make_inputs(70, kind, "-5 to 0 a step", delta, torch.float32)
    inputs["log_decay"][:, 40] = -torch.inf
    results = run(form, inputs)
    assert all(x.isfinite().all() for x in results.values())
    assert results["log_decay"][:, 40].abs().max() <= (0 if kind == "per head" else 1e-6)  # a difference that cancels
    fresh = {name: x if x is None or name == "initial_state" else x[:, 40:] for name, x in inputs.items()}
    o, state = form(**fresh | {"initial_state": torch.zeros_like(inputs["initial_state"])})
    torch.testing.assert_close(results["o"][:, 40:], o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results["state"], state, rtol=1e-5, atol=1e-5)


def test_float32_has_nothing_left_at_the_smallest_log_decay():
    assert torch.tensor(LOG_DECAY_MIN).exp() == 0 < torch.tensor(LOG_DECAY_MIN + 1).exp()


@pytest.mark.parametrize("form", [chunked, plain_chunked, recurrent])
@pytest.mark.parametrize("kind", ["none", "per head", "per channel"])
@with_and_without_the_delta_rule
def test_no_token_gives_no_output_and_leaves_the_state(form, kind, delta):
    inputs = make_inputs(0, kind, "-5 to 0 a step", delta)
    o, state = form(**inputs)
    assert o.shape == (B, 0, H, DV) and torch.equal(state, inputs["initial_state"])
    o, state = form(**inputs | {"initial_state": None})
    assert o.shape == (B, 0, H, DV) and state.shape == (B, H, DK, DV) and not state.any()
    assert explicit(**inputs)[0].shape == (B, H, 0, 0)


@with_and_without_the_delta_rule
def test_one_shared_head_of_q_and_k_equals_its_copies(delta):
    inputs = make_inputs(70, "per head", "-5 to 0 a step", delta)
    shared = inputs | {"q": inputs["q"][:, :, :1], "k": inputs["k"][:, :, :1]}
    copies = inputs | {"q": shared["q"].expand(-1, -1, H, -1), "k": shared["k"].expand(-1, -1, H, -1)}
    for form in (recurrent, plain_chunked, chunked):
        for x, expected in zip(form(**shared), form(**copies), strict=True):
            assert error(x, expected) < 1e-12


@pytest.mark.parametrize("chunk_size", [0, 3, 48, -2])
def test_a_chunk_is_a_power_of_two(chunk_size):
    with pytest.raises(ValueError, match="power of two"):
        chunked(**make_inputs(5, "none", None, delta=False), chunk_size=chunk_size)


@pytest.mark.skipif(not has_fla(), reason="needs a GPU and flash-linear-attention")
@pytest.mark.parametrize("kind", ["none", "per head", "per channel"])
@with_and_without_the_delta_rule
def test_the_kernels_of_fla_compute_the_chunked_form_with_every_gradient(kind, delta):
    inputs = make_inputs(200, kind, "-5 to 0 a step", delta, torch.float32)
    inputs = {name: x if x is None else x.cuda() for name, x in inputs.items()}
    expected = run(chunked, inputs)
    for name, x in run(fla, inputs).items():
        assert error(x, expected[name]) < 1e-2, name
