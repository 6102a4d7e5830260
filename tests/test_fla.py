"""fla's kernels compute the recurrence: here on a CPU, in Triton's interpreter, which needs no GPU.

python -m pytest tests/test_fla.py              the slow ones too: all kinds of sizes, dtypes and states

The interpreter has to be asked for before Triton is imported, and holds for the whole process. So what runs kernels
runs in a process of its own, `interpreter`, and hands numbers back.
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from ops import recurrence

MISSING = [name for name in ("triton", "fla") if importlib.util.find_spec(name) is None]
needs_the_kernels = pytest.mark.skipif(
    bool(MISSING),
    reason=f"no {' and no '.join(MISSING)} installed: pip install flash-linear-attention==0.6.0 triton==3.7.1",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}  # of the digits a dtype has
KINDS = [(decay, delta) for decay in ("none", "per head", "per channel") for delta in (False, True)]
every_kind = pytest.mark.parametrize(("kind", "delta"), KINDS)
every_mixer = pytest.mark.parametrize("mixer", ["cosformer", "gla", "mamba2", "gated_deltanet", "deltanet", "kda"])

# ----------------------------------------------------------------------------------------------------------------------
# The process with the interpreter


@pytest.fixture(scope="module")
def interpreter():
    """Calls a function of this file in the process where fla's kernels run on the CPU, and returns its value."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=start_interpreter) as process:
        yield lambda function, *args, **keys: process.submit(function, *args, **keys).result()


def start_interpreter():
    """Has Triton interpret kernels, and mends in its interpreter what fla's need and it hasn't."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert "triton" not in sys.modules
    warnings.simplefilter("ignore")
    import triton.language as tl
    from triton.runtime import autotuner
    from triton.runtime import interpreter as it

    torch.cpu.device = lambda index: contextlib.nullcontext()  # fla 0.5 asks every device's module for it

    def run_first_configuration(self, *args, **keys):  # to time them would take for ever
        return self.fn.run(*args, **keys, **self.configs[0].all_kwargs())

    autotuner.Autotuner.run = run_first_configuration

    # its loops count in Python's integers, on which fla calls methods of a tensor
    patch_language = it._patch_lang

    def patch_language_and_range(function):
        scope = patch_language(function)
        numbers = lambda *args: (it._implicit_cvt(i) for i in range(*args))  # noqa: E731
        scope.set_attr(sys.modules[function.__module__], "range", numbers)
        return scope

    it._patch_lang = patch_language_and_range

    # it keeps bfloat16 as 16 bits in an integer, and calculates with that integer: do so in float32, then round
    Builder, Reduction, Handle = it.InterpreterBuilder, it.ReduceScanOpInterface, it.TensorHandle

    def widened(x):
        is_bfloat16 = isinstance(x, Handle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16
        return Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if is_bfloat16 else x

    def rounded(x):  # comparisons stay what they are
        is_number = x.data.dtype == np.float32
        bits = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.uint16).numpy() if is_number else x.data
        return Handle(bits, tl.bfloat16)

    def in_float32(method):
        def call(self, *args):
            wide = [widened(x) for x in args]
            result = method(self, *wide)
            return rounded(result) if any(x is not y for x, y in zip(args, wide, strict=True)) else result

        return call

    def cast(self, x, dtype, *_, plain_cast=Builder.cast_impl):
        x = widened(x)
        return rounded(plain_cast(self, x, tl.float32)) if dtype.scalar == tl.bfloat16 else plain_cast(self, x, dtype)

    def reduce(self, x, plain_apply=Reduction.apply):
        if isinstance(x, tuple):
            return plain_apply(self, x)
        return plain_apply(self, x.to(tl.float32) if x.dtype == tl.bfloat16 else x)

    plain_dot = Builder.create_dot
    Builder.binary_op, Builder.unary_op = in_float32(Builder.binary_op), in_float32(Builder.unary_op)
    Builder.create_dot = lambda self, a, b, *rest: plain_dot(self, widened(a), widened(b), *rest)
    Builder.cast_impl = Builder.create_fp_to_fp = cast
    Builder.get_bf16 = lambda self, value: rounded(self.get_fp32(value))
    Reduction.apply = reduce


# ----------------------------------------------------------------------------------------------------------------------
# The kernels themselves


def definition(q, k, v, log_decay=None, beta=None, initial_state=None):
    """The recurrence, token by token, for each head apart: o (B, T, H, Dv) and the state (B, H, Dk, Dv)."""
    (B, T, _, Dk), (H, Dv) = q.shape, v.shape[2:]
    q, k = q.expand(B, T, H, Dk), k.expand(B, T, H, Dk)
    readouts, states = [], []
    for b, h in itertools.product(range(B), range(H)):
        S, o = v.new_zeros(Dk, Dv) if initial_state is None else initial_state[b, h], []
        for t in range(T):
            S = S if log_decay is None else torch.diag(log_decay[b, t, h].exp().expand(Dk)) @ S
            new = v[b, t, h] if beta is None else beta[b, t, h] * (v[b, t, h] - S.T @ k[b, t, h])
            S = S + torch.outer(k[b, t, h], new)
            o.append(S.T @ q[b, t, h])
        readouts.append(torch.stack(o))
        states.append(S)
    return torch.stack(readouts).view(B, H, T, Dv).transpose(1, 2), torch.stack(states).view(B, H, Dk, Dv)


def make_inputs(kind, delta, dtype, B=1, T=70, H=2, shared=False, Dk=8, Dv=8, state=True, lowest=-1.0):
    torch.manual_seed(0)
    q, k = (torch.randn(B, T, 1 if shared else H, Dk) for _ in range(2))
    k = F.normalize(k, dim=-1) if delta else k
    inputs = dict(q=q, k=k, v=torch.randn(B, T, H, Dv))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if kind != "none":
        log_decay = -torch.rand((B, T, H) if kind == "per head" else (B, T, H, Dk))
        inputs["log_decay"] = torch.where(torch.rand(log_decay.shape) < 0.1, lowest, log_decay)
    if delta:
        inputs["beta"] = torch.rand(B, T, H) * 2
    if state:
        inputs["initial_state"] = torch.randn(B, H, Dk, Dv)
    return inputs


def outcome(form, inputs, dtype=None):
    """Outputs, final state, and the gradient of a random weighting of both for every input, in float64."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    o, S = form(**leaves)
    torch.manual_seed(1)
    loss = (o.double() * torch.randn(o.shape).double()).sum() + (S.double() * torch.randn(S.shape).double()).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"o": o, "state": S} | dict(zip((f"d {name}" for name in leaves), gradients, strict=True))
    return {name: x.detach().double() for name, x in found.items()}


def distance(x, reference):
    """Relative, in norm; infinite for NaN."""
    distance = ((x - reference).norm() / reference.norm().clamp(min=1e-2)).item()
    return distance if distance == distance else float("inf")


def kernels_against(kind, delta, dtype, references, **sizes):
    """{(reference, what): distance} of fla's kernels; references: "definition" in float64, or "chunked"."""
    inputs, errors = make_inputs(kind, delta, DTYPES[dtype], **sizes), {}
    kernels = outcome(recurrence.fla, inputs)
    for name in references:
        is_definition = name == "definition"
        expected = outcome(definition if is_definition else recurrence.chunked, inputs, is_definition and torch.double)
        assert expected.keys() == kernels.keys()
        errors |= {(name, what): distance(kernels[what], x) for what, x in expected.items()}
    return errors


def check(errors, tolerance):
    assert errors
    assert not {what: error for what, error in errors.items() if not error < tolerance}


@needs_the_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_kind
def test_kernels_compute_the_definition_with_every_gradient(interpreter, kind, delta, dtype):
    check(interpreter(kernels_against, kind, delta, dtype, ["definition", "chunked"], H=1), TOLERANCE[dtype])


@needs_the_kernels
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(B=2, T=130, H=3, shared=True),
        dict(T=64, H=3, Dk=5, Dv=3, state=False),
        dict(T=1, Dk=1, Dv=1),
        dict(T=65, H=1, Dk=32, Dv=33),
        dict(T=17, H=1, Dk=130, Dv=8),
    ],
    ids=["shared heads", "no state, small odd widths", "one token", "one more value than keys", "wide keys"],
)
@every_kind
def test_kernels_compute_the_definition_at_every_size(interpreter, kind, delta, sizes, dtype):
    check(interpreter(kernels_against, kind, delta, dtype, ["definition"], **sizes), TOLERANCE[dtype])


@needs_the_kernels
@pytest.mark.parametrize(("Dk", "Dv"), [(8, 17), (17, 8)], ids=["values", "keys"])
def test_odd_widths_train_in_half_precision(interpreter, Dk, Dv):
    for dtype in ("bfloat16", "float16"):
        check(interpreter(kernels_against, "none", False, dtype, ["definition"], H=1, Dk=Dk, Dv=Dv), TOLERANCE[dtype])


@needs_the_kernels
@pytest.mark.parametrize("lowest", [-20.0, -1000.0, -float("inf")])
@pytest.mark.parametrize(("kind", "delta"), [kind for kind in KINDS if kind[0] != "none"])
def test_a_decay_may_forget_everything(interpreter, kind, delta, lowest):
    check(interpreter(kernels_against, kind, delta, "float32", ["definition"], H=1, T=20, lowest=lowest), 1e-5)


def states_of(kind, delta, T, dtype):
    """Outputs and final state of fla from a state in `dtype`, and from the same numbers in float32."""
    inputs = make_inputs(kind, delta, dtype, T=T)
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    return [recurrence.fla(**inputs), recurrence.fla(**inputs | {"initial_state": inputs["initial_state"].float()})]


@needs_the_kernels
@every_kind
def test_a_state_in_half_precision_is_taken_and_comes_back_in_float32(interpreter, kind, delta):
    (o, S), (expected_o, expected_S) = interpreter(states_of, kind, delta, 20, torch.bfloat16)
    assert S.dtype == torch.float32 and torch.equal(S, expected_S) and torch.equal(o, expected_o)


@needs_the_kernels
@every_kind
def test_no_tokens_leave_the_state_as_it_is(interpreter, kind, delta):
    for o, S in interpreter(states_of, kind, delta, 0, torch.bfloat16):
        expected = make_inputs(kind, delta, torch.bfloat16, T=0)["initial_state"].bfloat16().float()
        assert o.shape == (1, 0, 2, 8) and o.dtype == torch.bfloat16 and torch.equal(S, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Whole models


def models(mixer, dtype, autocast, T, **keys):
    """Distances between a GPT with PyTorch's recurrence and one with fla's. It takes the CPU's tensors for a GPU's."""
    torch.Tensor.is_cuda, recurrence.missing_for_fla = True, lambda: ""
    calls, kernels = [], recurrence.fla
    recurrence.fla = lambda *args, **keys: calls.append(1) or kernels(*args, **keys)
    try:
        keys = dict(n_head=2, block_size=T + 3, vocab_size=50, state_size=8, gate="native") | keys
        pair = []
        for name in ("torch", "fla"):
            torch.manual_seed(0)
            pair.append(GPT(GPTConfig(attention=mixer, kernels=name, **keys)).to(DTYPES[dtype]))
            for p in pair[-1].parameters():
                p.data += torch.randn(p.shape).to(p) * 0.1  # off its start: gates that begin at zero hide mistakes
        trained = [training(model, T, autocast) for model in pair]
        decoded = [decoding(model, T) for model in pair]
        assert len(calls) == 2 * keys["n_layer"]  # training and prefill
    finally:
        recurrence.fla = kernels
        del torch.Tensor.is_cuda
    distances = {name: distance(x, trained[0][name]) for name, x in trained[1].items()}
    return distances | {f"decoded {t}": distance(*pair) for t, pair in enumerate(zip(*decoded, strict=True))}


def training(model, T, autocast):
    """The loss and every gradient."""
    idx = torch.randint(50, (2, T + 1), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", DTYPES[autocast or "bfloat16"], enabled=autocast is not None):
        loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double()} | gradients


@torch.no_grad()
def decoding(model, T):
    """Logits of a prefill into the cache, then of three steps."""
    idx, logits = torch.randint(50, (2, T + 3), generator=torch.Generator().manual_seed(2)), []
    state, start = model.init_state(2, dtype=model.wte.weight.dtype), 0
    for end in range(T, T + 4):
        x, state = model.features(idx[:, start:end], state, start)
        logits.append(model.logits(x[:, -1]).double())
        start = end
    return logits


@needs_the_kernels
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
@every_mixer
def test_a_model_trains_and_decodes_with_the_kernels(interpreter, mixer, dtype, tolerance):
    check(interpreter(models, mixer, dtype, None, T=20, n_layer=1, n_embd=16), tolerance)


@needs_the_kernels
@pytest.mark.slow
@pytest.mark.parametrize(("autocast", "tolerance"), [(None, 1e-4), ("bfloat16", 0.05)])
@every_mixer
def test_a_longer_model_trains_and_decodes_with_the_kernels(interpreter, mixer, autocast, tolerance):
    layers = 2 if autocast is None else 1  # in half precision a second layer multiplies what rounding did in the first
    check(interpreter(models, mixer, "float32", autocast, T=70, n_layer=layers, n_embd=32), tolerance)


# ----------------------------------------------------------------------------------------------------------------------
# When they are used


@pytest.fixture
def gpu(monkeypatch):
    """Looks like a GPU with the version of fla that is asked for; a missing_for_fla that isn't remembered."""

    def install(version):
        monkeypatch.setattr(recurrence, "missing_for_fla", recurrence.missing_for_fla.__wrapped__)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("version", ["0.3.2", "0.4.2", "0.4.2.post1", "0.4.0rc1"])
def test_a_version_of_fla_that_is_too_old_is_named_and_not_used(gpu, helpers, version):
    gpu(lambda name: version)
    text = helpers.error_of(GPTConfig, attention="gla", kernels="fla")
    assert f"0.5 or later is needed, {version} is installed" in text and "pip install -U" in text
    with pytest.warns(UserWarning, match=f"{version} is installed.*plain PyTorch"):
        GPTConfig(attention="gla")
    assert not recurrence.has_fla()


@pytest.mark.parametrize("version", ["0.5", "0.5.0", "0.10.1", "1.0", "0.6.0rc1", "0.7.dev3+g1234"])
def test_fla_from_its_lowest_version_on_is_used(gpu, version):
    gpu(lambda name: version)
    with warnings.catch_warnings(action="error"):
        assert GPTConfig(attention="gla", kernels="fla") and GPTConfig(attention="gla") and recurrence.has_fla()


def test_a_gpu_without_fla_computes_in_plain_pytorch_and_reports_it(gpu, helpers):
    gpu(not_installed)
    assert "pip install flash-linear-attention" in helpers.error_of(GPTConfig, attention="gla", kernels="fla")
    with pytest.warns(UserWarning, match="not installed.*plain PyTorch"):
        GPTConfig(attention="softmax,gla")
    with warnings.catch_warnings(action="error"):  # nothing there would use it
        assert GPTConfig(attention="gla", kernels="torch") and GPTConfig(attention="softmax")


def test_without_a_gpu_fla_is_refused(helpers, monkeypatch):
    monkeypatch.setattr(recurrence, "missing_for_fla", recurrence.missing_for_fla.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in helpers.error_of(GPTConfig, attention="gla", kernels="fla")


def test_the_delta_rule_of_heads_over_256_is_refused_with_fla_and_runs_in_plain_pytorch_otherwise(gpu, helpers):
    gpu(lambda name: "0.6.0")
    wide = dict(attention="gated_deltanet", n_head=2, head_dim=257, position="none")
    text = helpers.error_of(GPTConfig, kernels="fla", **wide)
    assert "at most 256, not head_dim=257" in text and "kernels=auto" in text
    with pytest.warns(UserWarning, match="at most 256, not head_dim=257"):
        GPTConfig(**wide)
    with warnings.catch_warnings(action="error"):
        assert GPTConfig(kernels="torch", **wide) and GPTConfig(kernels="fla", **wide | {"head_dim": 256})
        assert GPTConfig(kernels="fla", **wide | {"attention": "gla"})


@pytest.mark.parametrize(
    ("forms", "keys", "dtype"),
    [
        ({"fla"}, dict(attention="gla"), torch.float32),
        ({"fla"}, dict(attention="gla", kernels="fla"), torch.float32),
        ({"chunked"}, dict(attention="gla", kernels="torch"), torch.float32),
        ({"chunked"}, dict(attention="gla"), torch.float64),
        ({"fla"}, dict(attention="gated_deltanet", head_dim=256), torch.float32),
        ({"chunked"}, dict(attention="gated_deltanet", head_dim=257), torch.float32),
        ({"fla"}, dict(attention="cosformer", head_dim=257), torch.float32),
    ],
)
@pytest.mark.filterwarnings("ignore:kernels=auto")
def test_a_model_on_a_gpu_uses_fla_where_it_computes_the_mixer(gpu, monkeypatch, forms, keys, dtype):
    gpu(lambda name: "0.6.0")
    used, chunked = set(), recurrence.chunked
    for name in ("fla", "chunked"):
        monkeypatch.setattr(recurrence, name, lambda *args, name=name, **keys: used.add(name) or chunked(*args, **keys))
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, position="none", **keys)).to(dtype)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert used == forms
