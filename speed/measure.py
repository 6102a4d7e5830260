"""What the parts of bench.py share: the sides of a comparison, their turns, and a decoded token.

theirs = Side(config, NANOGPT, B=8, **keys)
ours = Side(config, "softmax", B=8, **keys)
seconds = interleave({"theirs": theirs, "ours": ours}, config)
"""

import contextlib
import multiprocessing
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from model import GPT, GPTConfig
from runs.hardware import autocast, seconds_of
from runs.parallel import clip_gradients, share_out
from speed.config import BenchConfig
from train import TrainConfig, make_optimizers

NANOGPT = "nanoGPT"  # in place of the name of an attention
PLAIN = TrainConfig(learning_rate=1e-4, seed=0)
# the recurrent mixers whose speed is measured
RECURRENT = ("gla", "mamba2", "gated_deltanet", "deltanet", "kda", "cosformer")
TINY = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=256)  # of a rehearsal
# tokens of a timed call: where two models take turns, the one evicts the other's weights from the
# processor's cache, and only the first token of a call has to fetch them again
TOKENS = 16


class Side:
    """A model with that attention, or nanoGPT's without dropout and biases, each with its own
    optimizer.

    A call trains it once on its batch (inputs, targets) of B random rows. keys are those of
    GPTConfig, for nanoGPT those of its own. compiled: whether torch.compile makes the step. gpt: an
    edited class of GPT's.
    """

    def __init__(
        self,
        config: BenchConfig,
        name: str,
        B: int = 1,
        train: TrainConfig = PLAIN,
        compiled: bool = False,
        gpt: type[GPT] = GPT,
        **keys: Any,
    ):
        if config.rehearse:
            keys |= TINY | dict(block_size=keys["block_size"] // 32)
        generator = torch.Generator().manual_seed(0)
        shape = (2, B, keys["block_size"])
        batch = torch.randint(keys["vocab_size"], shape, generator=generator)
        self.batch = tuple(batch.to(config.device))
        self.config = config
        self.grad_clip = train.grad_clip
        torch.manual_seed(train.seed)
        if name == NANOGPT:
            with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size and its groups
                theirs = runpy.run_path(config.against, run_name="nanogpt_model")
                sizes = theirs["GPTConfig"](dropout=0.0, bias=False, **keys)
                self.model = theirs["GPT"](sizes).to(config.device)
                optimizer = self.model.configure_optimizers(
                    train.weight_decay,
                    train.learning_rate,
                    (train.beta1, train.beta2),
                    config.device,
                )
            self.optimizers = [optimizer]
            self.step_model: Any = torch.compile(self.model) if compiled else self.model
        else:
            self.model = gpt(GPTConfig(**keys, attention=name))
            self.step_model = step_of(self.model, config, compiled, train)
            self.optimizers = make_optimizers(self.model, train, config.device)

    def loss(self) -> torch.Tensor:
        inputs = [x.to(self.config.device) for x in self.batch]
        with autocast(self.config.device, self.config.dtype):
            loss = self.step_model(*inputs)
        return loss[1] if isinstance(loss, tuple) else loss  # nanoGPT returns it behind its logits

    def clip(self) -> None:
        clip_gradients(self.model, self.grad_clip)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.loss().backward()
        self.clip()
        self.update()


def step_of(
    model: GPT, config: BenchConfig, compiled: bool, train: TrainConfig = PLAIN
) -> torch.nn.Module:
    """Moves the model to the device, and returns what train.py calls in a step of one process."""
    alone: Any = SimpleNamespace(device=config.device, device_type=config.device, world_size=1)
    return share_out(model, train, alone, compiled, config.dtype)


def interleave(sides: dict, config: BenchConfig) -> dict[str, list[float]]:
    """{name: [seconds, ...]}: calls each side once untimed, then all in turn, every other round in
    reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for name in order:
        seconds_of(sides[name], config.device)
    for _ in range(config.pairs):
        for name in order:
            seconds[name].append(seconds_of(sides[name], config.device))
        order.reverse()
    return seconds


@torch.inference_mode()  # as GPT.stream
def prefilled(model: GPT, context: int, B: int = 1) -> Callable:
    """Returns decode(), which makes TOKENS tokens, one after the other, in B rows behind a context
    of that length, or of block_size - TOKENS tokens where that is less."""
    context = min(context, model.config.block_size - TOKENS)
    idx = torch.zeros(B, context, dtype=torch.long, device=model.wte.weight.device)
    _, state = model.features(idx, model.init_state(B, dtype=model.wte.weight.dtype), 0)

    @torch.inference_mode()
    def decode():
        nonlocal state
        last = idx[:, :1]
        for position in range(context, context + TOKENS):
            x, state = model.features(last, state, position)
            last = model.logits(x[:, -1]).argmax(-1, keepdim=True)  # (B, 1)
        return last.tolist()

    return decode


def in_new_processes(function: Callable, tasks: list[tuple], at_once: int = 1) -> list:
    """[function(*task), ...], each in a process of its own, so many at once."""
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, new, max_tasks_per_child=1) as pool:
        return list(pool.map(function, *zip(*tasks, strict=True)))
