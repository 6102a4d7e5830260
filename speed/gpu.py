"""The part gpu: what the first hour on a GPU asks, beside what docs/gpu.md expects of an H100. It takes ten minutes.

All of it is train.py: one run under torch's profiler, and runs under torchrun whose speeds are compared. On a CPU they
are small, and rows that need a GPU say so.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import torch
from torch.profiler import profile, record_function

import configurator
import model
import train
from data.pystdlib import prepare as pystdlib
from runs import checkpoint, files, memory, outdir
from speed.config import BenchConfig
from speed.costs import has_cache, of_any_length
from speed.report import Report

STEPS = 31
RUN = f"--max_iters={STEPS} --eval_interval={STEPS} --warmup_iters=1 --eval_whole=false --meters=false --compile=false"
ON_GPU = "--vocab_size=50304"  # 12 layers of 768, and 12 rows of 1,024 tokens
ON_CPU = "--n_layer=2 --n_head=4 --n_embd=64 --block_size=64 --vocab_size=512 --batch_size=4 --eval_tokens=1000"
PARTS = {  # of a run, and where train.py finds the function. The first six make a step
    "data": (train, "load_batches"),
    "forward": (train, "micro_loss"),  # but for the loss, which it calls
    "loss": (model, "cross_entropy_sum"),
    "backward": (torch.Tensor, "backward"),
    "clipping": (torch.nn.utils, "clip_grad_norm_"),
    "optimizer": (torch.optim.AdamW, "step"),
    "evaluation": (train, "evaluate"),
    "save": (checkpoint, "save"),
}


def bench_gpu(config: BenchConfig, report: Report) -> None:
    card = torch.cuda.get_device_name() if config.device == "cuda" else ""
    table = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|", (outdir.ROOT / "docs/gpu.md").read_text(), re.M)
    pairs = {"compiled / plain": [(1, "--compile=true"), (1,)]} | {f"{n} processes / 1": [(n,), (1,)] for n in (2, 8)}
    for mixer in (name for name in of_any_length() if not has_cache(name)):
        pairs[f"fla / plain: {mixer}"] = [(1, f"--attention={mixer}", f"--kernels={of}") for of in ("fla", "torch")]
    # in out_dir, since it is its disk that takes the time of a save
    with tempfile.TemporaryDirectory(dir=config.out_dir) as folder, contextlib.redirect_stdout(sys.stderr):
        pystdlib.main(["--most_bytes=1_000_000", "--val_fraction=0.1", f"--out_dir={folder}/data"])
        words = [*RUN.split(), *(ON_GPU if card else ON_CPU).split(), f"--dataset={folder}/data"]
        words += [f"--{name}={getattr(config, name)}" for name in ("device", "dtype", "threads")]
        speed = functools.cache(functools.partial(speed_of, words, folder))
        measures: dict = {"parts": lambda: profiled(words, f"{folder}/run"), "graphs": lambda: graphs(words)}
        measures |= {"train.py": lambda: speed(1)}
        measures |= {name: lambda pair=pair: speed(*pair[0]) / speed(*pair[1]) for name, pair in pairs.items()}
        for measure_name, measure in measures.items():
            try:
                found, lacks = measure(), ""
            except Exception as error:  # it must not cost the other rows
                found, lacks = None, checkpoint.first_line(error)
            for name, value in (found if isinstance(found, dict) else {measure_name: found}).items():
                unit, *limits = next((about for row, *about in table if name.startswith(row)), [""])
                expected = " to ".join(dict.fromkeys(limits))
                if card and limits and not lacks:
                    lacks = "yes" if value in limits or float(limits[0]) <= value <= float(limits[1]) else "no"
                agrees = lacks or "not compared"
                report.row(row=name, measured=value, unit=unit, expected=expected, agrees=agrees)


def page(about: dict, rows: list[dict]) -> str:
    """What an issue needs, in Markdown."""
    lines = [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| row | measured | unit | expected of an H100 | agrees |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row.values()))} |" for row in rows), ""])


def speed_of(words: list[str], folder: str, n: int, *more: str) -> float:
    """Tokens a second of each of n processes that share a run: the best of its log. Raises UserError."""
    config = configurator.load(train.TrainConfig, [*words, *more])  # raises for kernels that are not there
    is_cuda = config.device == "cuda"
    if n > (torch.cuda.device_count() if is_cuda else 2) or config.compile == "true" and not is_cuda:
        raise configurator.UserError(f"needs {n} GPU{'s' * (n > 1)}")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", outdir.ROOT / "train.py"]
        words = [*words, *more, f"--out_dir={out}", f"--gradient_accumulation_steps={n}"]
        ended = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True)
        if ended.returncode:
            raise configurator.UserError(re.search(r"[^\n]*error[^\n]*|$", ended.stderr, re.I)[0])
        return max(row.get("tokens_per_second", 0.0) for row in files.read_jsonl(f"{out}/metrics.jsonl")) / n


def graphs(words: list[str]) -> int:
    config = configurator.load(train.TrainConfig, words)
    net, idx = train.make_model(config, None, None)[0].to(config.device), torch.zeros(2, 64, dtype=torch.long)
    return torch._dynamo.explain(net)(idx.to(config.device), idx.to(config.device)).graph_count


def profiled(words: list[str], out: str) -> dict[str, float | str]:
    """The rows of one run in this process. Of a step: ms of kernels, launches, ms on the host. On a CPU operators that
    call no others take the place of kernels. Of an evaluation and a save: seconds."""
    with profile() as profiler, contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = record_function(part)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        check = stack.enter_context(mock.patch.object(memory, "check", wraps=memory.check))
        train.main([*words, f"--out_dir={out}"])
    peak, estimate = torch.cuda.max_memory_allocated() or None, check.call_args.args[1]
    seconds, events = within(profiler.events())
    rows: dict = {name: seconds[name] for name in ("evaluation", "save")}
    rows["ckpt.pt"] = os.path.getsize(f"{out}/ckpt.pt") / 1e9
    rows |= {"estimate": estimate / 1e9, "peak / estimate": peak and peak / estimate}
    is_cuda, waited, total = "--device=cuda" in words, 0.0, 0.0
    for part in list(PARTS)[:6]:
        operators = [] if is_cuda else [event.cpu_time_total for event in events[part] if not event.cpu_children]
        kernels = operators or [kernel.duration for event in events[part] for kernel in event.kernels]
        rows |= {part: sum(kernels) / 1e3 / STEPS, f"launches: {part}": len(kernels) / STEPS}
        rows[f"host: {part}"] = 1e3 * seconds[part]
        waits = [e.cpu_time_total for e in events[part] if re.match("cuda(Memcpy|.*Synchronize)", e.name)]
        waited, total = waited + sum(waits) / 1e3 / STEPS, total + rows[part]
    rows |= {"waits": waited, "loss / kernels": rows["loss"] / total}
    names = "\n".join(event.name for event in events["forward"])
    return rows | {"attention": re.findall(r"aten::_scaled_dot_product_(\w*)", names)[0]}


def within(events: list) -> tuple[dict[str, float], dict[str, list]]:
    """({part: seconds of its last call}, {part: what began on the host meanwhile, on whatever thread}).

    autograd has a thread of its own, which the profiler's sums of a range leave out.
    """
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    calls = sorted(
        (event.time_range.start, event.time_range.end, event.name) for event in events if event.name in PARTS
    )
    found: dict = {part: [] for part in PARTS}
    for event in events:
        around = [part for start, end, part in calls if start <= event.time_range.start < end]
        for part in around[-1:]:  # of a part in another one, the inner
            found[part].append(event)
    return {part: (end - start) / 1e6 for start, end, part in calls}, found
