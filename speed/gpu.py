"""What a GPU will see of a model, counted without one; and the part gpu, which measures on one.

    python -m speed.gpu                              the two tables of docs/gpu.md, in several minutes

`count` runs a step on the device "meta", whose tensors have a shape and no data; code that asks takes it for a GPU. A
value cannot be read there: a step that would make the host wait for a GPU raises an error. What is counted is the plain
PyTorch form, with one kernel for each operation.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from model import GPT, MIXERS, GPTConfig
from ops import recurrence
from ops.recurrence import chunked, fla, has_fla, missing_for_fla, recurrent
from runs.hardware import autocast, peak_flops, seconds_of
from speed.decoding import prefilled
from speed.report import BenchConfig, Report, interleave, paired
from speed.sides import nanogpt_step, our_step, random_batch

H100 = (989e12, 3.35e12)  # FLOP/s of dense bfloat16 products and bytes/s of memory, by the data sheet (SXM)
SIZE: dict = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50_304, block_size=1024)  # 125M parameters


@dataclass
class Counts:
    """Of a step: kernels, floating-point operations, bytes that all kernels and that matrix products alone move."""

    kernels: int = 0
    flops: int = 0
    bytes: int = 0
    product_bytes: int = 0


class Counting(TorchDispatchMode):
    """Adds up what each operation does that is neither a view nor an allocation."""

    def __init__(self):
        super().__init__()
        self.found = Counts()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        returned = [r.alias_info for r in function._schema.returns]
        is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        if is_view or "empty" in function._schema.name:
            return out
        name, results = function._overloadpacket, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name is torch.ops.aten.embedding:  # it reads only the rows that are asked for
            inputs = results
        # an expanded tensor is read once
        moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in inputs + results)
        self.found.kernels += 1
        self.found.bytes += moved
        if name in flop_registry:
            self.found.flops += flop_registry[name](*args, **kwargs or {}, out_val=out)
            self.found.product_bytes += moved
        return out


class FlashAttention(TorchFunctionMode):
    """Softmax attention as the one kernel that a GPU has for it, which torch would choose only where there is one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        keys = kwargs or {}
        if function is F.scaled_dot_product_attention and keys.get("attn_mask") is None:
            is_causal = keys.get("is_causal", False)
            return torch.ops.aten._scaled_dot_product_flash_attention(*args, 0.0, is_causal)[0]
        return function(*args, **keys)


def count(make_step: Callable, **keys) -> Counts:
    """Counts what make_step(model)() does; what make_step itself does is not counted.

    Weights and activations are bfloat16; recurrences compute in float32, as under autocast.
    """
    with torch.device("meta"), FlashAttention(), without_autocast():
        step = make_step(GPT(GPTConfig(**keys)).to(torch.bfloat16))
        with Counting() as counting:
            step()
    return counting.found


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """The device meta has no autocast: torch raises an error there even for switching it off, or asking for it."""
    import torch._dynamo  # noqa: F401 - it keeps the functions that it finds when it is first imported

    with (
        mock.patch.object(torch, "autocast", lambda *args, **keys: contextlib.nullcontext()),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: False),
    ):
        yield


def training_counts(B: int, T: int, **keys) -> Counts:
    """Forward, backward and the clipping of a step on B rows of T tokens, and a fused AdamW on float32 weights."""
    n_params = 0

    def make_step(model):
        nonlocal n_params
        n_params, idx = model.n_params(), torch.zeros(B, T, dtype=torch.long, device="meta")

        def step():
            model(idx, idx).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        return step

    found = count(make_step, **keys)
    # AdamW reads weight, gradient and two moments, and writes weight and moments; autocast reads weights and writes a
    # copy of 2 bytes; a gradient is float32 and was counted with 2
    moved = (7 * 4 + 6 + 2) * n_params
    return replace(
        found, kernels=found.kernels + 1, bytes=found.bytes + moved, product_bytes=found.product_bytes + moved
    )


def decoding_counts(B: int, context: int, **keys) -> Counts:
    """One more token in each of B rows behind a context."""

    def make_step(model):
        idx = torch.zeros(B, 1, dtype=torch.long, device="meta")
        state = model.init_state(B, device="meta", dtype=torch.bfloat16)

        @torch.no_grad()
        def step():
            x, _ = model.features(idx, state, context)
            model.logits(x[:, -1]).argmax(-1)

        return step

    return count(make_step, **keys)


def roofline(found: Counts, peak: float = H100[0], bandwidth: float = H100[1]) -> tuple[float, float]:
    """(least, most) seconds of a step at the limits of a device: at least its FLOPs and what its matrix products move,
    at most all that its kernels move, one after the other. No launch and no wait is in it.
    """
    least = max(found.flops / peak, found.product_bytes / bandwidth)
    return least, found.flops / peak + found.bytes / bandwidth


def roofline_table(B: int = 16, T: int = 1024) -> list[str]:
    """The Markdown table of docs/gpu.md: an estimate for every mixer at 125M on an H100."""
    lines = [
        "| mixer | kernels a step | TFLOPs | GB, all kernels | GB, products | ms a step | MFU "
        "| kernels a token | MB a token | µs a token |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MIXERS:
        keys = SIZE | dict(attention=name, gate="native" if MIXERS[name].native_gate else "none")
        step, token = training_counts(B, T, **keys), decoding_counts(1, T - 1, **keys)
        least, most = roofline(step)
        with torch.device("meta"):
            useful = 3 * GPT(GPTConfig(**keys)).flops_per_token(T) * B * T
        shares = [f"{useful / H100[0] / seconds:.0%}" for seconds in (most, least)]
        token_least, token_most = roofline(token)
        lines.append(
            f"| {name} | {step.kernels:,} | {step.flops / 1e12:.1f} | {step.bytes / 1e9:.0f} "
            f"| {step.product_bytes / 1e9:.0f} | {1e3 * least:.0f} to {1e3 * most:.0f} | {shares[0]} to {shares[1]} "
            f"| {token.kernels:,} | {token.bytes / 1e6:.0f} | {1e6 * token_least:.0f} to {1e6 * token_most:.0f} |"
        )
    return lines


@dataclass
class Fused:
    """What inductor makes of a step: operations before it fuses them, then kernels and their bytes, each way."""

    operations: int
    forward: int
    backward: int
    forward_bytes: int
    backward_bytes: int


def fused(name: str, T: int = 256, **smaller) -> Fused:
    """Counts the kernels that inductor writes for a CPU of a step of one layer, in float32. They are never run.

    Products and softmax attention are calls of libraries: their bytes are counted, and they are no kernels.
    """
    from torch._inductor import async_compile, graph, metrics  # a second's import
    from torch._inductor import config as inductor

    keys: dict = dict(n_layer=1, n_head=4, n_embd=128, vocab_size=256, block_size=T) | smaller
    model = GPT(GPTConfig(**keys, attention=name, gate="native" if MIXERS[name].native_gate else "none"))
    idx, sizes = torch.zeros(1, T, dtype=torch.long), []
    write = graph.GraphLowering.compile_to_module

    def record(self):
        module = write(self)
        sizes.append(self.count_bytes()[0])
        # kernels that are not run leave their outputs as they are, and libraries read some of these as indices
        module.empty_strided_cpu = lambda *args: torch.empty_strided(*args[:2], dtype=args[2]).zero_()
        return module

    torch._dynamo.reset()
    metrics.reset()
    with (
        # a cached graph brings its backward along, and both would count as forward
        inductor.patch(force_disable_caches=True),
        mock.patch.object(graph.GraphLowering, "compile_to_module", record),
        # a C++ compiler would take minutes, and what the kernels compute does not matter here
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", lambda *args: lambda *pointers: None),
    ):
        loss = torch.compile(model)(idx, idx)
        forward = metrics.generated_kernel_count
        loss.backward()
    torch._dynamo.reset()
    return Fused(metrics.ir_nodes_pre_fusion, forward, metrics.generated_kernel_count - forward, *sizes)


def fused_table(names: Iterable[str] = tuple(MIXERS)) -> Iterator[str]:
    """The lines of the Markdown table of kernels in docs/gpu.md."""
    yield "| mixer | operations before fusion | kernels forward | kernels backward | MB forward | MB backward |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        found = fused(name)
        sizes = f"{found.forward_bytes / 1e6:.1f} | {found.backward_bytes / 1e6:.1f}"
        yield f"| {name} | {found.operations} | {found.forward} | {found.backward} | {sizes} |"


# ----------------------------------------------------------------------------------------------------------------------
# The part gpu: what only a GPU can tell


def bench_gpu(config: BenchConfig, report: Report) -> None:
    """fla against `chunked`; what a gate costs at 125M; how models compile; 200 steps of 125M and their MFU."""
    compare_kernels(config, report)
    gate_overhead(config, report)
    compile_counts(config, report)
    long_run(config, report)


def compare_kernels(config: BenchConfig, report: Report, T: int = 1000, form: Callable = fla) -> None:
    """The largest relative error of fla's kernels against `chunked` in float32, for what each mixer asks of them.

    The inputs are those of the mixers of a small model on random tokens; a token behind a state is decoded, too.
    """
    if form is fla and not has_fla():
        report.lines.append(f"fla: not compared, {missing_for_fla()}")
        return
    for name, mixer in MIXERS.items():
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=256, vocab_size=256, block_size=2048, attention=name))
        mixer = model.to(config.device).blocks[0].mixer
        inputs = recurrence_inputs(mixer, torch.randn(2, T, 256, device=config.device))
        if inputs is None:
            continue
        found = {}
        for side, compute in (("fla", form), ("chunked", chunked)):
            leaves = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
            q, k, v = (leaves[key] for key in "qkv")
            more: dict = {key: x for key, x in leaves.items() if key not in "qkv"}
            o, S = compute(q, k, v, **more)
            weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
            gradients = torch.autograd.grad((o.float() * weight).sum(), list(leaves.values()))
            q, k, v = (x[:, -1:] for x in (q, k, v))  # one more token, behind the state that was left
            token, _ = recurrent(q, k, v, **{key: x[:, -1:] for key, x in more.items()}, initial_state=S)
            found[side] = {"forward": o, "decoding": token} | {
                f"d {key}": g for key, g in zip(leaves, gradients, strict=True)
            }
        errors = {key: relative_error(found["fla"][key], x) for key, x in found["chunked"].items()}
        backward = max(error for key, error in errors.items() if key.startswith("d "))
        report.row(mixer=name, forward=errors["forward"], backward=backward, decoding=errors["decoding"])
        report.claim(f"{name}: largest relative error of fla", [(max(errors.values()), 1.0)], 1e-2, at_most=True)


def recurrence_inputs(mixer: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The arguments with which a mixer calls its recurrence on x (B, T, C); None for softmax, which has none."""
    seen = []

    def record(q, k, v, **keys):
        seen.append({"q": q, "k": k, "v": v} | {name: y for name, y in keys.items() if y is not None})
        return chunked(q, k, v, **keys)

    with (
        mock.patch.object(recurrence, "chunked", record),
        mock.patch.object(recurrence, "fla", record),
        torch.no_grad(),
    ):
        mixer(x)
    return seen[0] if seen else None


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.detach().float(), y.detach().float()
    return float((x - y).norm() / y.norm())


def gate_overhead(config: BenchConfig, report: Report, B: int = 8, **smaller) -> None:
    """An elementwise and a headwise gate over none: a step, a forward and a token, against the predicted "under 3%"."""
    keys = SIZE | smaller
    batch = random_batch(config, keys["vocab_size"], B, keys["block_size"])
    steps = {
        gate: our_step(config, config.dtype, batch, config.compile, **keys, gate=gate)
        for gate in ("none", "elementwise", "headwise")
    }

    def forward(model):
        @torch.no_grad()
        def call():
            with autocast(config.device, config.dtype):
                model(*batch)

        return call

    columns = {
        "training step": steps,
        "forward": {gate: forward(step.model) for gate, step in steps.items()},
        "token": {gate: prefilled(step.model, keys["block_size"] // 2) for gate, step in steps.items()},
    }
    for column, sides in columns.items():
        seconds = interleave(sides, config.pairs, config)
        for gate in ("elementwise", "headwise"):
            report.claim(f"125M, {column}, {gate} / none", paired(seconds, gate, "none"), 1.03, at_most=True)


def compile_counts(config: BenchConfig, report: Report, B: int = 8, backend: str = "inductor", **smaller) -> None:
    """Graphs, graph breaks and generated kernels of a step. A second length compiles a second time.

    train.py pads rows to one length when it compiles, and so has one graph.
    """
    from torch._inductor import metrics  # a second's import

    keys = SIZE | smaller
    for name in MIXERS:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**keys, attention=name)).to(config.device)
        row = {}
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        metrics.reset()
        compiled = torch.compile(model, backend=backend)
        for T in (keys["block_size"], keys["block_size"], keys["block_size"] // 2):
            batch = random_batch(config, keys["vocab_size"], B, T)
            with autocast(config.device, config.dtype):
                seconds = seconds_of(lambda call=compiled, batch=batch: call(*batch).backward(), config.device)
            if not row:
                row = {"kernels": metrics.generated_kernel_count, "first_step_s": seconds}
        counters = torch._dynamo.utils.counters
        report.row(
            compiled=name,
            graphs=counters["stats"]["unique_graphs"],
            breaks=sum(counters["graph_break"].values()),
            **row,
        )


def long_run(config: BenchConfig, report: Report, steps: int = 200, B: int = 16, **smaller) -> None:
    """Steps of 125M in a row: tokens/s and MFU of softmax, of each other mixer, and of nanoGPT with its own compile."""
    keys = SIZE | smaller
    batch, tokens = random_batch(config, keys["vocab_size"], B, keys["block_size"]), B * keys["block_size"]
    peak, source = peak_flops(config.device, config.dtype)
    sides: dict = {name: dict(attention=name) for name in MIXERS} | ({"nanoGPT": {}} if config.against else {})
    report.lines.append(f"MFU against {peak / 1e12:.3g} TFLOP/s, {source}")
    flops = {}
    for name, more in sides.items():
        torch._dynamo.reset()
        if name == "nanoGPT":
            step = nanogpt_step(config, config.dtype, batch, config.compile, **keys)
            flops[name] = flops["softmax"]  # as many products, but for the positions that it looks up
        else:
            step = our_step(config, config.dtype, batch, config.compile, **keys, **more)
            flops[name] = 3 * step.model.flops_per_token(keys["block_size"]) * tokens
        step()  # compiles

        def run(step=step):
            for _ in range(steps):
                step()

        seconds = seconds_of(run, config.device) / steps
        mfu = flops[name] / seconds / peak
        report.row(run=name, steps=steps, ms=1e3 * seconds, tokens_s=tokens / seconds, mfu=mfu)


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__ if sys.argv[1:] == ["--help"] else "error: speed.gpu takes no words")
    torch.set_num_threads(1)  # inductor splits sums for several threads, and then makes other kernels
    for line in itertools.chain(roofline_table(), [""], fused_table()):
        print(line, flush=True)
