"""The part decode: what one more token costs.

A timed call makes TOKENS tokens, as a text is made: where two models take turns, the one evicts the other's weights
from the processor's cache, and only the first token of a call has to fetch them again.
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from model import GPT, MIXERS, GPTConfig
from speed.report import BenchConfig, Report, interleave, paired
from speed.sides import SMALL, keeps_every_token, nanogpt_model
from study.interventions import decoding_speed

TOKENS = 16  # of a timed call


@torch.inference_mode()  # as GPT.stream
def prefilled(model: GPT, context: int, B: int = 1) -> Callable:
    """Returns decode(), which makes TOKENS tokens, one after the other, in B rows behind a context of that length."""
    device = model.wte.weight.device
    idx = torch.zeros(B, context, dtype=torch.long, device=device)
    _, state = model.features(idx, model.init_state(B), 0)

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
    """6 x 384, float32, one thread: ms per token at several contexts, alone and in batches of 8 and 32.

    nanoGPT reads the whole context for every token. A call of either side makes TOKENS tokens.
    """
    torch.set_num_threads(1)  # products of one row leave a second thread nothing to do
    contexts = (64, 256, 1024, 4096)
    keys: dict = SMALL | dict(vocab_size=256, block_size=4096 + TOKENS)
    decoders = {}
    for name in MIXERS:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**keys, attention=name)).to(config.device).eval()
        decoders[name] = {context: prefilled(model, context) for context in contexts}
    if config.against:
        compare_decoding(config, report, decoders)
    for name, by_context in decoders.items():
        seconds = interleave(by_context, config.pairs, config)
        for context in contexts:
            report.row(mixer=name, context=context, ms=1e3 * statistics.median(seconds[context]) / TOKENS)
        if not keeps_every_token(name):
            report.claim(f"{name}: token at context 4,096 / at 64", paired(seconds, 4096, 64), 1.1, at_most=True)
    model = GPT(GPTConfig(**keys, attention="gla")).to(config.device).eval()
    report.row(**closed_heads(config, keys))
    for B in (1, 8, 32):
        seconds = interleave({B: prefilled(model, 1, B)}, config.pairs, config)[B]
        report.row(mixer="gla", batch=B, tokens_s=B * TOKENS / statistics.median(seconds))
    products = interleave({"all": matrix_vector_products(model)}, config.pairs, config)["all"]
    report.row(floor="the matrix-vector products of a token alone (gla)", ms=1e3 * statistics.median(products))
    torch.set_num_threads(config.threads)


def compare_decoding(config: BenchConfig, report: Report, decoders: dict) -> None:
    """Claims against nanoGPT's generate, of gla (with a state) and of softmax (with a KV cache)."""
    nano = nanogpt_model(config, **SMALL, vocab_size=256, block_size=1024).eval()
    gla = GPT(GPTConfig(**SMALL, vocab_size=256, block_size=4096 + TOKENS, attention="gla")).to(config.device).eval()
    for B, context, for_state, for_cache in (
        (1, 256, 14, 12),
        (1, 1024, 60, 50),
        (8, 256, 14, None),
        (32, 256, 14, None),
    ):
        idx = torch.zeros(B, context, dtype=torch.long, device=config.device)
        sides = {"nanoGPT": lambda idx=idx: nano.generate(idx, TOKENS)}
        sides["state"] = decoders["gla"][context] if B == 1 else prefilled(gla, context, B)
        targets = {"state": for_state}
        if for_cache is not None:
            sides["cache"], targets["cache"] = decoders["softmax"][context], for_cache
        seconds = interleave(sides, config.pairs if B * context == 256 else config.long_pairs, config)
        for side, target in targets.items():
            rows = "" if B == 1 else f" in {B} rows"
            name = f"token at context {context:,}{rows}, nanoGPT / ours with a {side}"
            report.claim(name, paired(seconds, "nanoGPT", side), target)


def matrix_vector_products(model: GPT) -> Callable:
    """Returns call(), which multiplies one row by every matrix of the model: no step of decoding can do less."""
    weights = [p.detach() for p in model.parameters() if p.dim() == 2]
    rows = {n: torch.zeros(1, n, device=weights[0].device) for n in {w.shape[1] for w in weights}}
    return lambda: [F.linear(rows[w.shape[1]], w) for w in weights]


@torch.no_grad()
def closed_heads(config: BenchConfig, keys: dict) -> dict:
    """Times softmax at a context of 4,000 with a headwise gate that closes five of six heads, which can be skipped."""
    model = GPT(GPTConfig(**keys, gate="headwise", gate_bias=1.0)).to(config.device).eval()
    for block in model.blocks:
        block.mixer.gates["readout"].proj.bias[1:] = -40.0
    prompt = torch.zeros(1, 4000, dtype=torch.long, device=config.device)
    return {"closed heads": "5 of 6"} | decoding_speed(model, prompt, 0.1)
