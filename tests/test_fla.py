"""fla's kernels compute the recurrence: here on a CPU, in Triton's interpreter, which needs no GPU.

The interpreter has to be asked for before Triton is imported, and holds for the whole process. So what runs kernels
runs in a process of its own, `interpreter`, and hands numbers back.
"""

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from test_recurrence import LENGTHS, STRONG_DECAYS, as_dtype, definition, each_alone, error, make_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import variants  # noqa: F401
from model import GPT, GPTConfig
from ops import kernels, recurrence
from runs.notes import forms_that_ran

needs_the_kernels = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and importlib.util.find_spec("fla")),
    reason="needs both: pip install flash-linear-attention==0.6.0 triton==3.7.1",
)
# the interpreter has no bfloat16; float16 stands for half precision
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # of the digits a dtype has
KINDS = [(decay, delta) for decay in ("none", "per head", "per channel") for delta in (False, True)]
MIXERS = ["cosformer", "gla", "mamba2", "gated_deltanet", "deltanet", "kda", "deltaproduct", "mamba3"]

LAUNCHED: list = []  # names of what a GPU would run

# -- the process with the interpreter ----------------------------------------------------------------------------------


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
    from triton.runtime import autotuner
    from triton.runtime import interpreter as it

    torch.cpu.device = lambda index: contextlib.nullcontext()  # fla 0.5 asks every device's module for it

    def run_first_configuration(self, *args, **keys):  # to time them would take for ever
        LAUNCHED.append("kernel")
        with _disable_current_modes():  # of the interpreter's own operators nobody asks
            return self.fn.run(*args, **keys, **self.configs[0].all_kwargs())

    autotuner.Autotuner.run = run_first_configuration

    # its loops count in Python's integers, on which fla calls methods of a tensor
    patch_language = it._patch_lang

    def patch_language_and_range(function):
        scope = patch_language(function)
        module = sys.modules[function.__module__]
        scope.set_attr(module, "range", lambda *args: (it._implicit_cvt(i) for i in range(*args)))
        return scope

    it._patch_lang = patch_language_and_range


# -- the kernels themselves --------------------------------------------------------------------------------------------


def kernels_against(kind, delta, dtype, T=70, H=1, decay="-5 to 0 a step", state=True, **sizes):
    """{what: distance} of outputs, final state and every gradient, fla's kernels against the definition in float64."""
    inputs = make_inputs(T, kind, decay, delta, dtype, **dict(B=1, H=H, DV=8) | sizes)
    inputs = {name: x for name, x in inputs.items() if name != "erase" and (state or name != "initial_state")}
    results = run(kernels.fla, inputs)
    return {name: error(results[name], x) for name, x in run(definition, as_dtype(inputs, torch.float64)).items()}


def packed_kernels_against(kind, delta, dtype):
    """The same of packed documents, against the definition on each."""
    inputs = make_inputs(sum(LENGTHS), kind, "-5 to 0 a step", delta, dtype, H=1, DV=8)
    inputs = {name: x for name, x in inputs.items() if x is not None and name != "initial_state"}
    bounds = torch.tensor([0, *LENGTHS, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)  # of two rows
    outputs = run(lambda **leaves: (kernels.fla(**leaves, bounds=bounds)[0], leaves["q"]), inputs)
    alone = run(lambda **leaves: (each_alone(definition)(**leaves)[0], leaves["q"]), as_dtype(inputs, torch.float64))
    return {name: error(outputs[name], x) for name, x in alone.items()}


def check(errors, tolerance):
    assert errors
    assert not {what: error for what, error in errors.items() if not error < tolerance}


SIZES = [  # shared heads; no state and small odd widths; one value more than keys
    dict(B=2, T=130, H=3, shared=True),
    dict(T=64, H=3, DK=5, DV=3, state=False),
    dict(T=65, DK=32, DV=33),
]


@needs_the_kernels
@pytest.mark.parametrize("sizes", [{}, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SIZES)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "delta"), KINDS)
def test_kernels_compute_the_definition_with_every_gradient(interpreter, kind, delta, dtype, sizes):
    check(interpreter(kernels_against, kind, delta, dtype, **sizes), TOLERANCE[dtype])


@needs_the_kernels
@pytest.mark.parametrize(("kind", "delta"), KINDS)
def test_kernels_keep_packed_documents_apart_with_every_gradient(interpreter, kind, delta):
    check(interpreter(packed_kernels_against, kind, delta, torch.float32), TOLERANCE[torch.float32])


@needs_the_kernels
@pytest.mark.parametrize("decay", ["-20 or 0, at random", *STRONG_DECAYS])
@pytest.mark.parametrize(("kind", "delta"), [kind for kind in KINDS if kind[0] != "none"])
def test_a_decay_may_forget_everything(interpreter, kind, delta, decay):
    check(interpreter(kernels_against, kind, delta, torch.float32, T=20, decay=decay), 5e-5)  # sums to -600


# -- a norm and the gate behind it -------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Adds torch's operators to LAUNCHED, but for views and new memory: a GPU would launch a kernel for each."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.__name__:
            LAUNCHED.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_used", [False, True])
def test_fla_is_used_where_it_is_installed_and_there_is_a_gpu(monkeypatch, helpers, is_used):
    monkeypatch.setattr(kernels, "has_fla", kernels.has_fla.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_used else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in helpers.error_of(GPTConfig, attention="gla", kernels="fla")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.has_fla() == is_used
    with contextlib.nullcontext() if is_used else pytest.warns(UserWarning, match="plain PyTorch; install flash-l"):
        GPTConfig(attention="softmax,gla")


ON_A_GPU = [  # what a model calls beside torch's functions
    ("fla", dict(attention="gla", kernels="fla")), ("fla", dict(gate="native")), ("fla", dict(gate="none")),
    ("fla", dict(attention="kda", gate="native+elementwise")), ("chunked", dict(dtype=torch.float64)),
    ("", dict(attention="softmax")), ("chunked", dict(kernels="torch")), ("fla", dict(attention="mamba2")),
    ("fla", dict(attention="mamba3")), ("fla", dict(attention="gated_deltanet", head_dim=256)),
    ("chunked", dict(attention="gated_deltanet", head_dim=257)), ("chunked", dict(attention="gated_deltanet2")),
]  # fmt: skip


@pytest.mark.parametrize(("used", "keys"), ON_A_GPU)
def test_a_model_on_a_gpu_uses_fla_where_it_computes_the_mixer(monkeypatch, used, keys):
    calls, chunked = set(), recurrence.chunked
    monkeypatch.setattr(kernels, "has_fla", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)

    def spy(name, *args, bounds=None, **keys):
        calls.add(name)
        return chunked(*args, **keys)

    for module, name in ((kernels, "fla"), (recurrence, "chunked")):
        monkeypatch.setattr(module, name, functools.partial(spy, name))
    keys = dict(n_layer=1, n_head=1, n_embd=8, vocab_size=5, attention="gla", gate="elementwise") | keys
    dtype = keys.pop("dtype", torch.float32)
    model = GPT(GPTConfig(**keys)).to(dtype)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert calls == set(used.split())
    told = {"fla": "fla's kernels", "chunked": "plain PyTorch, chunk by chunk"}
    expected = [f"recurrence: {told[name]}, in 1 of 1 layers" for name in told if name in calls]
    assert forms_that_ran(model) == expected
