"""Whether a card computes what the CPU computes in float64: logits, loss, every gradient and greedy
decoding.

One table, a row for each mixer, kernels, dtype, compiled or not. A distance is the norm of a
difference over the norm of the CPU's numbers. bfloat16 has an error of its own, above all in small
gradients: a distance may be three times that of the CPU in the same dtype, or LIMITS, whatever is
larger.
"""

import copy
import math
from dataclasses import replace

import torch

from model import GPT, MIXERS, GPTConfig, Softmax
from ops import IGNORE
from ops.kernels import has_fla
from runs.hardware import autocast
from speed.config import BenchConfig
from speed.measure import step_of
from speed.rows import Rows

LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
TIMES_CPU = 3.0
VOCABULARY = 512
COMPILED = ("softmax", "gla", "mamba2", "gated_deltanet")  # the last takes longest
PROMPT = 16  # tokens, before greedy decoding


def measure(kernels: str, is_compiled: bool, config: BenchConfig, rows: Rows) -> None:
    """Every mixer in plain PyTorch, those of COMPILED compiled. kernels=auto: recurrent mixers
    alone, which take fla's kernels where it has them."""
    if kernels == "auto" and not has_fla() and not config.rehearse:
        rows.write("fla", "agreement", skipped="fla is not installed")
        return
    names = list(COMPILED if is_compiled else MIXERS)
    if kernels == "auto":
        names = [name for name in names if not issubclass(MIXERS[name], Softmax)]
    if config.rehearse and (is_compiled or kernels == "auto"):
        names = names[:2]
    torch.set_float32_matmul_precision("highest")  # TF32 would be the largest difference
    for mixer in names:
        row = f"{mixer}, kernels={kernels}, {'compiled' if is_compiled else 'plain'}"
        with rows.attempt(row):
            of_cpu = small_model(config, mixer, "torch")
            exact_model = copy.deepcopy(of_cpu).double()
            exact = numbers_of(exact_model, exact_model, "cpu", "float32")  # without autocast
            for dtype, limit in LIMITS.items():
                usual = numbers_of(of_cpu, of_cpu, "cpu", dtype)
                model = small_model(config, mixer, kernels)
                step_model = step_of(model, replace(config, dtype=dtype), is_compiled)
                numbers = numbers_of(model, step_model, config.device, dtype)
                found = verdict(numbers, exact, usual, limit)
                found["form"] = model.blocks[0].mixer.form or "attention"
                if not is_compiled:  # decoding is not
                    margin = margin_of_decoding(model.eval(), exact_model, config.device, dtype)
                    found["decoding"] = margin
                    found["agrees"] = found["agrees"] and margin <= limit
                rows.write(f"{row}, {dtype}", "agreement", **found)


def small_model(config: BenchConfig, mixer: str, kernels: str) -> GPT:
    """The same weights for every kernel, with noise on each of them: gates that start at zero would
    hide what they gate. The output layer is not the embedding, with which any mixer would draw the
    token that was read last."""
    width, length, n_layer = (32, 32, 1) if config.rehearse else (128, 256, 2)
    torch.manual_seed(1)
    keys = GPTConfig(
        n_layer=n_layer,
        n_head=4,
        n_embd=width,
        block_size=min(length, MIXERS[mixer].longest or length),
        vocab_size=VOCABULARY,
        tie_embeddings=False,
        attention=mixer,
        gate="native" if MIXERS[mixer].native_gate else "elementwise",
        kernels=kernels,
    )
    model = GPT(keys)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def numbers_of(
    model: GPT, step_model: torch.nn.Module, device: str, dtype: str
) -> dict[str, torch.Tensor]:
    """{name: logits, loss, or the gradient of a parameter that has one}, in float64 on the CPU.
    step_model: what computes the loss."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, 2, model.config.block_size)
    idx, targets = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    targets[:, ::7] = IGNORE
    model.zero_grad(set_to_none=True)
    with autocast(device, dtype):
        loss = step_model(idx, targets)
        with torch.no_grad():
            logits = model(idx)
    loss.backward()
    found = {"logits": logits, "loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name}"] = p.grad
    return {name: x.double().cpu() for name, x in found.items()}


def distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of the exact numbers."""
    return float((x - exact).norm() / exact.norm().clamp(min=1e-30))


def verdict(found: dict, exact: dict, usual: dict, limit: float) -> dict:
    """The numbers of a row: the distances of logits, loss and the gradient that is farthest off;
    `differs` names all that are too far, with their distances. usual: the CPU's in the same
    dtype."""
    distances = {}
    differs = []
    for name, right in exact.items():
        distances[name] = distance(found[name], right) if name in found else math.inf
        allowed = max(limit, TIMES_CPU * distance(usual[name], right))
        if not distances[name] <= allowed:  # NaN is not
            differs.append(f"{name}: {distances[name]:.2g}, allowed {allowed:.2g}")
    return {
        "logits": distances.pop("logits"),
        "loss": distances.pop("loss"),
        "gradient": max(distances.values()),
        "differs": "; ".join(differs)[:300],
        "agrees": not differs,
    }


def margin_of_decoding(model: GPT, exact_model: GPT, device: str, dtype: str) -> float:
    """By how much a token that greedy decoding takes falls short of the likeliest one of the exact
    model, at most, over the largest logit: 0 where all tokens are the same."""
    n_new = min(100, model.config.block_size - PROMPT)
    prompt = torch.randint(VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(4))
    with autocast(device, dtype):
        ids = model.generate(prompt.to(device), n_new, temperature=0).cpu()
    with torch.no_grad():
        logits = exact_model(ids[:, :-1])[:, PROMPT - 1 :]
    taken = logits.gather(-1, ids[:, PROMPT:, None])[..., 0]
    return float((logits.amax(-1) - taken).max() / logits.abs().max())
