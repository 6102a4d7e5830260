"""The parts train, overhead, length and decode: what a training step and one more token cost."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from keys import CLASS_OF
from model import GPT, MIXERS
from speed.config import BenchConfig
from speed.measure import NANOGPT, Report, Side, peak_mb, random_batch

# the size at which a step and a token are compared with nanoGPT's
SMALL: dict = dict(n_layer=6, n_head=6, n_embd=384)
PUBLISHED = ("elementwise", "headwise")  # Qiu et al. 2025
GATES: dict[str, dict] = {
    "elementwise": dict(gate="elementwise"),
    "headwise": dict(gate="headwise"),
    "rank 16": dict(gate="elementwise", gate_rank=16),
    "elementwise, match_params": dict(gate="elementwise", match_params=True),
}
# tokens of a timed call: where two models take turns, the one evicts the other's weights from the
# processor's cache, and only the first token of a call has to fetch them again
TOKENS = 16


def bench_train(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 256, B = 8, in float32 and in bfloat16: our step and nanoGPT's, with autocast
    alike."""
    for vocab_size, pairs in ((256, config.pairs), (50_304, config.long_pairs)):
        batch = random_batch(config, vocab_size, 8, 256)
        keys = SMALL | dict(block_size=256, vocab_size=vocab_size)
        for dtype in ("float32", "bfloat16"):
            in_dtype = replace(config, dtype=dtype)
            ours = Side(in_dtype, "softmax", batch, **keys)
            theirs = Side(in_dtype, NANOGPT, batch, **keys)
            name = f"step in {dtype}, {vocab_size:,} ids, nanoGPT / ours"
            report.compare(config, name, theirs, ours, pairs, target=1.0)
    exact = replace(config, dtype="float32")
    memory = [peak_mb(exact, name, batch, keys) for name in ("softmax", NANOGPT)]
    name = "peak memory, float32, 50,304 ids, ours / nanoGPT"
    report.ratio(name, memory[:1], memory[1:], target=1.0, at_most=True)


def bench_overhead(config: BenchConfig, report: Report) -> None:
    """4 x 768, T = 512: what a gate costs in a training step, a forward, decoding and memory,
    beside its FLOPs.

    The claims are about the steps of the published gates.
    """
    keys: dict = dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=256)
    batch = random_batch(config, 256, 2, 512)
    plain = Side(config, "softmax", batch, **keys)
    memory = peak_mb(config, "softmax", batch, keys)
    for name, gate in GATES.items():
        gated = Side(config, "softmax", batch, **keys | gate)
        flops = gated.model.flops_per_token() / plain.model.flops_per_token()
        target = round(flops + 0.02, 4) if name in PUBLISHED else None
        calls: dict = {
            "training step": (gated, plain),
            "forward": [torch.no_grad()(side.loss) for side in (gated, plain)],
            "decoding": [prefilled(side.model, 256) for side in (gated, plain)],
        }
        for kind, (above, below) in calls.items():
            limit = dict(target=target, at_most=True) if kind == "training step" else {}
            row = f"{kind}, {name} / none"
            report.compare(config, row, above, below, config.pairs, **limit)
        gated_memory = peak_mb(config, "softmax", batch, keys | gate)
        report.row(gate=name, flops=flops, memory=gated_memory / memory)


def bench_length(config: BenchConfig, report: Report) -> None:
    """2 x 256, as many tokens a step at every length: tokens/s of a training step."""
    for name in of_any_length():
        sides = {}
        for T in (1024, config.longest):
            batch = random_batch(config, 256, max(1, config.longest // T), T)
            keys: dict = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=256, block_size=T)
            sides[T] = Side(config, name, batch, **keys)
        row = f"{name}: tokens/s at {config.longest:,} / at 1,024"
        report.compare(config, row, sides[1024], sides[config.longest], config.long_pairs)


def of_any_length() -> list[str]:
    """Mixers that take long texts, without the variants of softmax."""
    names = [name for name, mixer in MIXERS.items() if mixer.longest is None]
    return [name for name in names if name not in CLASS_OF.values()]


@torch.inference_mode()  # as GPT.stream
def prefilled(model: GPT, context: int, B: int = 1) -> Callable:
    """Returns decode(), which makes TOKENS tokens, one after the other, in B rows behind a context
    of that length."""
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


def bench_decode(config: BenchConfig, report: Report) -> None:
    """6 x 384, float32, one thread: a token behind a long context and behind a short one, and
    beside nanoGPT's generate."""
    torch.set_num_threads(1)  # products of one row leave a second thread nothing to do
    keys: dict = SMALL | dict(vocab_size=256)
    models: dict = {}
    for name in of_any_length():
        models[name] = Side(config, name, **keys, block_size=4096 + TOKENS).model.eval()
        row = f"{name}: token at context 4,096 / at 64"
        long, short = (prefilled(models[name], context) for context in (4096, 64))
        report.compare(config, row, long, short, config.pairs)
    if config.against:  # nanoGPT's generate reads the whole context for every token
        theirs = Side(config, NANOGPT, **keys, block_size=1024).model.eval()
        # the claim is of the shorter context; behind the longer one nanoGPT has more to read
        for context, pairs, target in ((256, config.pairs, 1.0), (1024, config.long_pairs, None)):
            idx = torch.zeros(1, context, dtype=torch.long, device=config.device)
            generate = functools.partial(theirs.generate, idx, TOKENS)
            for side, mixer in (("state", "gla"), ("cache", "softmax")):
                ours = prefilled(models[mixer], context)
                row = f"token at context {context:,}, nanoGPT / ours with a {side}"
                report.compare(config, row, generate, ours, pairs, target=target)
    torch.set_num_threads(config.threads)
