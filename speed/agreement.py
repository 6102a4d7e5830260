"""Whether a card computes what the CPU computes in float64: logits, loss, every gradient and greedy
decoding.

One table, a row for each mixer, kernels, dtype, compiled or not. A distance is the norm of a
difference over the norm of the CPU's numbers. bfloat16 has an error of its own, above all in small
gradients: a distance may be three times that of the CPU in the same dtype, or LIMITS, whatever is
larger.
"""

import contextlib
import math
from dataclasses import replace

import torch

from model import GPT, MIXERS, GPTConfig
from ops.kernels import has_fla
from runs.hardware import autocast
from speed.config import BenchConfig
from speed.costs import has_cache
from speed.measure import step_of
from speed.rows import Rows

LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
TIMES_CPU = 3.0
VOCABULARY = 512
COMPILED = ("softmax", "gla", "gated_deltanet", "mamba2")
PROMPT = 16  # tokens, before greedy decoding


def plain(config: BenchConfig, rows: Rows) -> None:
    """Every mixer in plain PyTorch."""
    for mixer in MIXERS:
        rows.attempt(mixer, compare, config, rows, mixer, "torch", False)


def compiled(config: BenchConfig, rows: Rows) -> None:
    """Some mixers in plain PyTorch, compiled."""
    for mixer in COMPILED[: 2 if config.rehearse else None]:
        rows.attempt(f"{mixer}, compiled", compare, config, rows, mixer, "torch", True)


def fla(config: BenchConfig, rows: Rows) -> None:
    """Recurrent mixers with kernels=auto, which takes fla's where it has them, and some of them
    compiled."""
    if not has_fla() and not config.rehearse:
        rows.write("fla", "agreement", skipped="fla is not installed")
        return
    recurrent = [name for name in MIXERS if MIXERS[name].longest is None and not has_cache(name)]
    for mixer in recurrent[: 2 if config.rehearse else None]:
        rows.attempt(f"{mixer}, fla", compare, config, rows, mixer, "auto", False)
    for mixer in COMPILED[1 : 2 if config.rehearse else None]:
        rows.attempt(f"{mixer}, fla, compiled", compare, config, rows, mixer, "auto", True)


def compare(config: BenchConfig, rows: Rows, mixer: str, kernels: str, is_compiled: bool) -> None:
    """Writes a row for each dtype."""
    torch.set_float32_matmul_precision("highest")  # TF32 would be the largest difference
    of_cpu = small_model(config, mixer, "torch")
    batch = small_batch(of_cpu.config.block_size)
    usual = {dtype: numbers_of(of_cpu, batch, "cpu", dtype) for dtype in LIMITS}
    exact_model = small_model(config, mixer, "torch").double()
    exact = numbers_of(exact_model, batch, "cpu", "float64")
    for dtype in LIMITS:
        model = small_model(config, mixer, kernels)
        if is_compiled:
            torch._dynamo.reset()
        step_model = step_of(model, replace(config, dtype=dtype), is_compiled)
        found = numbers_of(model, batch, config.device, dtype, step_model)
        row: dict = {"form": model.blocks[0].mixer.form or "attention"}
        row |= verdict(found, exact, usual[dtype], LIMITS[dtype])
        if not is_compiled:  # decoding is not
            row["decoding"] = margin_of_decoding(model.eval(), exact_model, config.device, dtype)
            row["agrees"] = row["agrees"] and row["decoding"] <= LIMITS[dtype]
        name = f"{mixer}, kernels={kernels}, {'compiled' if is_compiled else 'plain'}, {dtype}"
        rows.write(name, "agreement", **row)


def small_model(config: BenchConfig, mixer: str, kernels: str) -> GPT:
    """The same weights for every kernel, with noise on each of them: gates that start at zero would
    hide what they gate. The output layer is not the embedding, with which any mixer would draw the
    token that was read last."""
    T = min(32 if config.rehearse else 256, MIXERS[mixer].longest or 256)
    gate = "native" if MIXERS[mixer].native_gate else "elementwise"
    width = 32 if config.rehearse else 128
    keys: dict = dict(n_layer=2, n_head=4, n_embd=width, block_size=T, vocab_size=VOCABULARY)
    keys |= dict(tie_embeddings=False)
    torch.manual_seed(1)
    model = GPT(GPTConfig(**keys, attention=mixer, gate=gate, kernels=kernels))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def small_batch(T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (2, T), one in seven without a label."""
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(VOCABULARY, (2, 2, T), generator=generator)
    targets[:, ::7] = -100
    return idx, targets


def numbers_of(
    model: GPT, batch: tuple, device: str, dtype: str, step_model=None
) -> dict[str, torch.Tensor | None]:
    """{name: logits, loss, or the gradient of a parameter}, in float64 on the CPU. step_model: what
    computes the loss (None: the model)."""
    idx, targets = (x.to(device) for x in batch)
    model.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if dtype == "float64" else autocast(device, dtype):
        loss = (model if step_model is None else step_model)(idx, targets)
        with torch.no_grad():
            logits = model(idx)
    loss.backward()
    found = {"logits": logits, "loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {name: x if x is None else x.double().cpu() for name, x in found.items()}


def distance(x: torch.Tensor | None, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of the exact numbers; infinity where there is no
    number."""
    if x is None:
        return math.inf
    found = float((x - exact).norm() / exact.norm().clamp(min=1e-30))
    return found if math.isfinite(found) else math.inf


def verdict(found: dict, exact: dict, usual: dict, limit: float) -> dict:
    """The numbers of a row: the distances of logits and loss, and of the gradient that is the
    farthest off for what the CPU's is; `differs` names all that are too far. usual: the CPU's in
    the same dtype."""
    distances, allowed = {}, {}
    for name, right in exact.items():
        if right is not None:
            distances[name] = distance(found[name], right)
            allowed[name] = max(limit, TIMES_CPU * distance(usual[name], right))
    gradients = [name for name in distances if name.startswith("gradient")]
    worst = max(gradients, key=lambda name: distances[name] / allowed[name])
    too_far = [name for name in distances if not distances[name] <= allowed[name]]
    return {
        "logits": distances["logits"],
        "loss": distances["loss"],
        "gradient": distances[worst],
        "of": worst.removeprefix("gradient of "),
        "allowed": allowed[worst],
        "differs": ", ".join(too_far)[:200],
        "agrees": not too_far,
    }


def margin_of_decoding(model: GPT, exact_model: GPT, device: str, dtype: str) -> float:
    """By how much a token that greedy decoding takes falls short of the likeliest one of the exact
    model, at most, over the largest logit: 0 where all tokens are the same."""
    config = model.config
    n_new = min(100, config.block_size - PROMPT)
    prompt = torch.randint(VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(4))
    with autocast(device, dtype):
        ids = model.generate(prompt.to(device), n_new, temperature=0).cpu()
    with torch.no_grad():
        logits = exact_model(ids[:, :-1])[:, PROMPT - 1 :]
    taken = logits.gather(-1, ids[:, PROMPT:, None])[..., 0]
    return float((logits.amax(-1) - taken).max() / logits.abs().max())
