"""The parts train, overhead, length and decode: what a training step and one more token cost."""

import operator
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from keys import CLASS_OF
from model import GPT, MIXERS, Softmax
from runs.hardware import gemm_rate, seconds_of
from speed.config import BenchConfig
from speed.measure import NANOGPT, SMALL, Report, Side, interleave, peak_mb, random_batch

PUBLISHED = {name: dict(gate=name) for name in ("elementwise", "headwise")}  # Qiu et al. 2025
# tokens of a timed call: where two models take turns, the one evicts the other's weights from the
# processor's cache, and only the first token of a call has to fetch them again
TOKENS = 16
CONTEXTS = (64, 256, 1024, 4096)


def bench_train(config: BenchConfig, report: Report) -> None:
    """6 x 384, T = 256, B = 8, in float32 and in bfloat16: our step and nanoGPT's, with autocast
    alike."""
    names = {"ours": "softmax"} | ({NANOGPT: NANOGPT} if config.against else {})
    exact = replace(config, dtype="float32")
    for vocab_size, pairs in ((256, config.pairs), (50_304, config.long_pairs)):
        batch, keys = (
            random_batch(config, vocab_size, 8, 256),
            SMALL | dict(block_size=256, vocab_size=vocab_size),
        )
        for in_dtype in (exact, replace(config, dtype="bfloat16")):
            sides = {side: Side(in_dtype, name, batch, **keys) for side, name in names.items()}
            seconds, dtype = interleave(sides, pairs, config), in_dtype.dtype
            flops = 3 * sides["ours"].model.flops_per_token(256) * 8 * 256
            for side, values in seconds.items():
                median = statistics.median(values)
                rates = dict(
                    tokens_s=2048 / median,
                    gemm_share=flops / median / gemm_rate(config.device, dtype),
                )
                report.row(side=f"{side} {dtype}", vocabulary=vocab_size, ms=1e3 * median, **rates)
            if config.against:
                name = f"step in {dtype}, {vocab_size:,} ids, nanoGPT / ours"
                report.ratio(name, seconds[NANOGPT], seconds["ours"], target=1.0)
    memory = {side: peak_mb(exact, name, batch, keys) for side, name in names.items()}
    report.row(vocabulary=vocab_size, peak_mb=memory)
    if config.against:
        name = "peak memory, float32, 50,304 ids, ours / nanoGPT"
        report.ratio(name, [memory["ours"]], [memory[NANOGPT]], target=1.0, at_most=True)


def bench_overhead(config: BenchConfig, report: Report) -> None:
    """4 x 768, T = 512: what a gate costs in a training step, a forward, decoding and memory,
    beside its FLOPs.

    The claims are about the published gates.
    """
    arms = PUBLISHED | {
        "rank 16": dict(gate="elementwise", gate_rank=16),
        "elementwise, match_params": dict(gate="elementwise", match_params=True),
    }
    keys: dict = dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=256)
    batch = random_batch(config, 256, 2, 512)
    base, base_memory = (
        Side(config, "softmax", batch, **keys),
        peak_mb(config, "softmax", batch, keys),
    )
    for name, gate in arms.items():
        gated = Side(config, "softmax", batch, **keys | gate)
        flops = gated.model.flops_per_token() / base.model.flops_per_token()
        calls: dict = {
            "step": {side: side for side in (gated, base)},
            "forward": {side: torch.no_grad()(side.loss) for side in (gated, base)},
            "decode": {side: prefilled(side.model, 256) for side in (gated, base)},
        }
        times = {
            kind: interleave(sides, config.pairs, config).values() for kind, sides in calls.items()
        }
        medians = {
            kind: statistics.median(map(operator.truediv, *both)) for kind, both in times.items()
        }
        memory = peak_mb(config, "softmax", batch, keys | gate) / base_memory
        report.row(gate=name, flops=flops, **medians, memory=memory)
        target = round(flops + 0.02, 4) if name in PUBLISHED else None
        report.ratio(f"training step, {name} / none", *times["step"], target=target, at_most=True)


def bench_length(config: BenchConfig, report: Report) -> None:
    """2 x 256, as many tokens a step at every T: tokens/s of a training step, and its memory. Then,
    of 6 x 384 and one row, a step's FLOPs at the rate of a matrix product of the same dtype, over
    its time."""
    longest = 1 << config.longest.bit_length() - 1  # as many tokens at every T
    for name in of_any_length():
        sides, T = {}, 256
        while T <= longest:
            keys: dict = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=256, block_size=T)
            batch = random_batch(config, 256, longest // T, T)
            sides[T] = Side(config, name, batch, **keys)
            seconds = min(seconds_of(sides[T], config.device) for _ in range(2))
            memory = peak_mb(config, name, batch, keys)
            report.row(mixer=name, T=T, tokens_s=longest / seconds, peak_mb=memory)
            T *= 4 if has_cache(name) and T >= 4096 else 2  # the cost grows with T^2
        if not has_cache(name) and 16_384 in sides:
            seconds = interleave({T: sides[T] for T in (1024, 16_384)}, config.long_pairs, config)
            report.ratio(f"{name}: tokens/s at 16,384 / at 1,024", *seconds.values())
    for name in of_any_length():
        T = min(4096, longest)
        side = Side(
            config, name, random_batch(config, 256, 1, T), **SMALL, block_size=T, vocab_size=256
        )
        flops = 3 * side.model.flops_per_token(T) * T
        side()  # untimed
        pairs = [
            (flops / gemm_rate(config.device, config.dtype), seconds_of(side, config.device))
            for _ in range(config.long_pairs)
        ]
        report.ratio(f"{name}: step at {T:,}, share of the GEMM rate", *zip(*pairs, strict=True))


def of_any_length() -> list[str]:
    """Mixers that take long texts, without the variants of softmax."""
    variants = CLASS_OF.values()
    return [
        name for name, mixer in MIXERS.items() if mixer.longest is None and name not in variants
    ]


def has_cache(name: str) -> bool:
    """Whether a token costs more behind a longer context: a KV cache grows with it, a recurrent
    state does not."""
    return issubclass(MIXERS[name], Softmax)


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
    """6 x 384, float32, one thread: ms per token at several contexts, and beside nanoGPT's
    generate."""
    torch.set_num_threads(1)  # products of one row leave a second thread nothing to do
    keys: dict = SMALL | dict(vocab_size=256)
    keys_of_ours = keys | dict(block_size=max(CONTEXTS) + TOKENS)
    models: dict = {
        name: Side(config, name, **keys_of_ours).model.eval() for name in of_any_length()
    }
    for name, model in models.items():
        seconds = interleave(
            {context: prefilled(model, context) for context in CONTEXTS}, config.pairs, config
        )
        for context in CONTEXTS:
            report.row(
                mixer=name, context=context, ms=1e3 * statistics.median(seconds[context]) / TOKENS
            )
        if not has_cache(name):
            report.ratio(f"{name}: token at context 4,096 / at 64", seconds[4096], seconds[64])
    if config.against:  # nanoGPT's generate reads the whole context for every token
        generate = Side(config, NANOGPT, **keys, block_size=1024).model.eval().generate
        ours = {"state": models["gla"], "cache": models["softmax"]}
        for B, context in ((1, 256), (1, 1024), (8, 256), (32, 256)):
            idx = torch.zeros(B, context, dtype=torch.long, device=config.device)
            sides: dict = {
                side: prefilled(ours[side], context, B) for side in (ours if B == 1 else ["state"])
            }
            # claims are of the shortest context; behind a longer one, and in more rows, nanoGPT has
            # more to read
            pairs, target = (config.pairs, 1.0) if B * context == 256 else (config.long_pairs, None)
            seconds = interleave(
                {NANOGPT: lambda idx=idx: generate(idx, TOKENS)} | sides, pairs, config
            )
            rows = "" if B == 1 else f" in {B} rows"
            for side in sides:
                name = f"token at context {context:,}{rows}, nanoGPT / ours with a {side}"
                report.ratio(name, seconds[NANOGPT], seconds[side], target=target)
    torch.set_num_threads(config.threads)
