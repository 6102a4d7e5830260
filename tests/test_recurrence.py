"""The forms of the recurrence are the definition, and agree, in outputs, final state and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from ops.kernels import fla, has_fla
from ops.recurrence import chunked, quadratic, recurrent

B, H, DK, DV = 2, 3, 8, 5
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
STRONG_KINDS = list(itertools.product(("per head", "per channel"), STRONG_DECAYS))
every_shape = pytest.mark.parametrize("kind", ["none", "per head", "per channel"])
with_and_without_the_delta_rule = pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta rule"])
every_rule = pytest.mark.parametrize("delta", [False, True, "erase"], ids=["plain", "delta rule", "another key erases"])


def make_inputs(T, kind, decay, delta, dtype=torch.float64, B=B, H=H, DK=DK, DV=DV, shared=False):
    """Arguments of the forms by name: random, with the decay and the delta rule (False, True or "erase") asked for."""
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, 1 if shared else H, DK).double()
    v = torch.randn(B, T, H, DV).double()
    k = F.normalize(k, dim=-1) if delta else k
    log_decay = None
    if kind != "none":
        log_decay = (DECAYS | STRONG_DECAYS)[decay]((B, T, H) if kind == "per head" else (B, T, H, DK))
    beta, state = torch.rand(B, T, H).double() if delta else None, torch.randn(B, H, DK, DV).double()
    erase = F.normalize(torch.randn(q.shape).double(), dim=-1) if delta == "erase" else None
    return as_dtype(dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, initial_state=state, erase=erase), dtype)


def as_dtype(inputs, dtype):
    return {name: None if x is None else x.to(dtype) for name, x in inputs.items()}


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


def assert_near(results, expected, limit):
    for name, x in results.items():
        assert x.isfinite().all() and error(x, expected[name]) < limit, name


def explicit(v, initial_state=None, **inputs):
    """The weights, from an empty state, with the signature of the other forms."""
    return quadratic(**inputs), v


def definition(q, k, v, *, log_decay=None, beta=None, erase=None, initial_state=None):
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = q_t^T S_t; with beta v_t := beta_t (v_t - (a_t S_{t-1})^T k_t) first,
    or erase_t in place of this k_t."""
    S, outputs, erase = initial_state, [], k if erase is None else erase
    if S is None:
        S = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    for t in range(q.shape[1]):
        if log_decay is not None:
            a = log_decay[:, t].exp()
            S = torch.einsum("bhkv,bhk->bhkv" if a.dim() == 3 else "bhkv,bh->bhkv", S, a)
        new = v[:, t]
        if beta is not None:
            new = torch.einsum("bh,bhv->bhv", beta[:, t], new - torch.einsum("bhkv,bhk->bhv", S, erase[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


@pytest.mark.parametrize("T", [1, 17, 64, 65, 200])
@pytest.mark.parametrize(("kind", "decay"), KINDS)
@every_rule
def test_every_form_is_the_definition_with_every_gradient(T, kind, decay, delta):
    inputs = make_inputs(T, kind, decay, delta)
    expected = run(definition, inputs)
    assert_near(run(recurrent, inputs), expected, 1e-10)
    for chunk_size in (None, 1, 16, 64):
        assert_near(run(chunked, inputs, chunk_size=chunk_size), expected, 1e-10)
    (weights, v), from_zeros = explicit(**inputs), inputs | {"initial_state": None}
    expected = dict(enumerate(definition(**from_zeros)))
    assert_near({0: torch.einsum("bhij,bjhv->bihv", weights, v)}, expected, 1e-10)
    assert_near(dict(enumerate(chunked(**from_zeros))), expected, 1e-10)


# of documents in a row of 70: borders at a chunk's edge and beside it, documents of one token
LENGTHS = [16, 1, 1, 14, 17, 15, 5, 1]


def each_alone(form, lengths=LENGTHS):
    """The form, called for each document of packed rows; the state of the last one."""

    def of_rows(**inputs):
        parts = {name: x.split(lengths, dim=1) for name, x in inputs.items()}
        found = [form(**{name: x[i] for name, x in parts.items()}) for i in range(len(lengths))]
        return torch.cat([o for o, _ in found], dim=1), found[-1][1]

    return of_rows


def first_of(lengths=LENGTHS):
    """(B, T): whether a token begins a document."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return torch.zeros(B, sum(lengths)).index_fill(1, starts, 1.0).bool()


@pytest.mark.parametrize(("kind", "decay"), [*KINDS, *STRONG_KINDS])
@every_rule
def test_in_every_form_a_decay_of_zero_keeps_packed_documents_apart_with_every_gradient(kind, decay, delta):
    inputs = make_inputs(sum(LENGTHS), kind, decay, delta)
    del inputs["initial_state"]
    first = first_of()
    # the gradient of a log-decay of -20 a step is terms of size 1 that cancel
    limit = 1e-11 if decay == "-20 a step" else 1e-12
    expected = run(each_alone(definition), inputs)
    assert_near(run(recurrent, inputs, first=first), expected, limit)
    for chunk_size in (None, 1, 16, 64):
        assert_near(run(chunked, inputs, chunk_size=chunk_size, first=first), expected, limit)
    weights, v = explicit(**inputs, first=first)
    assert_near({"o": torch.einsum("bhij,bjhv->bihv", weights, v)}, expected, limit)
    of_two_documents = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)) == 0
    assert not weights[..., of_two_documents].any()


@pytest.mark.parametrize("B", [1, 2])
@every_shape
@every_rule
def test_one_head_of_q_and_k_may_be_shared_by_all_heads(B, kind, delta):
    inputs = make_inputs(16, kind, "-5 to 0 a step", delta, B=B, shared=True)
    assert_near(run(chunked, inputs), run(definition, inputs), 1e-10)


@pytest.mark.parametrize(("kind", "decay"), [*KINDS, *STRONG_KINDS])
@with_and_without_the_delta_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_stays_near_float64_and_bfloat16_inputs_are_computed_in_it(kind, decay, delta, dtype):
    """Stated error ratio 2e-5 (measured: 2e-7 without decay; 1e-5 with log-decays to -40, whose sums lose digits)."""
    inputs = make_inputs(200, kind, decay, delta, dtype)
    results, expected = run(chunked, inputs), run(recurrent, as_dtype(inputs, torch.float64))
    assert results["o"].dtype == results["state"].dtype == torch.float32
    # what rests on exp(-20) alone is below float32's reach, and the gradient of a bfloat16 input is rounded
    seen = {name: x for name, x in results.items() if x.dtype == torch.float32 and expected[name].norm() > 1e-3}
    assert_near(seen, expected, 2e-5)


@pytest.mark.parametrize("form", [recurrent, chunked, explicit])
@pytest.mark.parametrize(("kind", "decay"), KINDS[::3])
@with_and_without_the_delta_rule
def test_autocast_changes_nothing_forward_or_backward(form, kind, decay, delta):
    inputs = make_inputs(70, kind, decay, delta, dtype=torch.float32)
    inputs["initial_state"] = None if form is explicit else inputs["initial_state"]
    expected = run(form, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(form, inputs)
    for name, x in results.items():
        assert x.dtype == torch.float32 and torch.equal(x, expected[name]), name


@pytest.mark.parametrize("form", [chunked, recurrent])
def test_no_token_gives_no_output_and_leaves_the_state(form):
    inputs = make_inputs(0, "per head", "-5 to 0 a step", delta=True)
    o, state = form(**inputs)
    assert o.shape == (B, 0, H, DV) and torch.equal(state, inputs["initial_state"])


@pytest.mark.skipif(not has_fla(), reason="needs a GPU and flash-linear-attention")
@every_shape
@with_and_without_the_delta_rule
def test_the_kernels_of_fla_compute_the_chunked_form_with_every_gradient(kind, delta):
    inputs = make_inputs(200, kind, "-5 to 0 a step", delta, torch.float32)
    inputs = {name: x if x is None else x.cuda() for name, x in inputs.items()}
    assert_near(run(fla, inputs), run(chunked, inputs), 1e-2)
