"""The part gpu: what the first hour on a GPU asks, beside what docs/gpu.md expects of an H100. It takes ten minutes.

All of it is train.py: runs under torchrun, whose speeds are compared, and one under torch's profiler. On a CPU they are
small, and rows that need a GPU say so.
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
from runs import checkpoint, memory
from runs.files import read_jsonl
from runs.outdir import ROOT
from speed.baselines import random_batch
from speed.config import BenchConfig
from speed.costs import has_cache, of_any_length
from speed.report import Report

STEPS = 31
RUN = f"--max_iters={STEPS} --eval_interval={STEPS} --warmup_iters=1 --eval_whole=false --meters=false --compile=false"
ON_CPU = "--n_layer=2 --n_head=4 --n_embd=64 --block_size=64 --vocab_size=512 --batch_size=4 --eval_tokens=1000"
ON_GPU = "--block_size=1024 --vocab_size=50304 --batch_size=16 --eval_tokens=65536"  # 12 layers of 768, by default
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
    expectations = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \|", (ROOT / "docs" / "gpu.md").read_text(), re.M)
    pairs = {
        "compiled / plain": ((1, "--compile=true"), (1,)),
        "2 processes / 1": ((2,), (1,)),
        "8 processes / 1": ((8,), (1,)),
    }
    for mixer in (name for name in of_any_length() if not has_cache(name)):
        of_mixer = (1, f"--attention={mixer}")
        pairs[f"fla / plain: {mixer}"] = (*of_mixer, "--kernels=fla"), (*of_mixer, "--kernels=torch")
    # in out_dir, since it is its disk that takes the time of a save
    with tempfile.TemporaryDirectory(dir=config.out_dir) as folder, contextlib.redirect_stdout(sys.stderr):
        pystdlib.main(["--most_bytes=1_000_000", "--val_fraction=0.1", f"--out_dir={folder}/data"])
        words = [*RUN.split(), *(ON_GPU if card else ON_CPU).split(), f"--dataset={folder}/data"]
        words += [f"--{name}={getattr(config, name)}" for name in ("device", "dtype", "threads")]
        speed = functools.cache(functools.partial(speed_of, words, folder))
        measures: dict = {"parts": lambda: profiled(words, folder), "train.py": lambda: speed(1)}
        measures |= {name: lambda pair=pair: speed(*pair[0]) / speed(*pair[1]) for name, pair in pairs.items()}
        for name, measure in measures.items():
            try:
                found, lacks = measure(), ""
            except Exception as error:  # it must not cost the other rows
                found, lacks = None, checkpoint.first_line(error)
            for row, measured in (found if isinstance(found, dict) else {name: found}).items():
                unit, expected = next((about for of, *about in expectations if row.startswith(of)), ("", ""))
                agrees = lacks or (agreement(measured, expected) if card and expected else "not compared")
                report.row(row=row, measured=measured, unit=unit, expected=expected, agrees=agrees)


def agreement(measured: float | str, expected: str) -> str:
    """yes or no: whether a number is in "2 to 1,000", or a name in "one or other"."""
    if isinstance(measured, str):
        return "yes" if measured in expected else "no"
    least, most = (float(bound) for bound in expected.replace(",", "").split(" to "))
    return "yes" if least <= measured <= most else "no"


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
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", str(ROOT / "train.py")]
        words = [*words, *more, f"--out_dir={out}", f"--gradient_accumulation_steps={n}"]
        ended = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True)
        if ended.returncode:
            raise configurator.UserError(re.search(r"[^\n]*error[^\n]*|$", ended.stderr, re.I)[0])
        return max(row.get("tokens_per_second", 0.0) for row in read_jsonl(f"{out}/metrics.jsonl")) / n


def profiled(words: list[str], folder: str) -> dict[str, float | str]:
    """The rows of one run in this process: ms of kernels and launches a step (on a CPU, of operators), and the rest."""
    is_cuda, out = "--device=cuda" in words, f"{folder}/run"
    with profile() as profiler, contextlib.ExitStack() as stack:
        for name, (owner, function) in PARTS.items():
            marked = record_function(name)(getattr(owner, function))
            stack.enter_context(mock.patch.object(owner, function, marked))
        check = stack.enter_context(mock.patch.object(memory, "check", wraps=memory.check))
        train.main([*words, f"--out_dir={out}"])
    peak, needed = torch.cuda.max_memory_allocated(), check.call_args.args[1]
    seconds, events = within(profiler.events())
    rows: dict = {
        "data on the host": 1e3 * seconds["data"],
        "evaluation": seconds["evaluation"],
        "save": seconds["save"],
    }
    rows |= {
        "ckpt.pt": os.path.getsize(f"{out}/ckpt.pt") / 1e9,
        "peak memory": peak / 1e9,
        "peak / estimate": peak / needed,
    }
    in_a_step = list(PARTS)[:6]
    for part in in_a_step:
        operators = [] if is_cuda else [event.cpu_time_total for event in events[part] if not event.cpu_children]
        kernels = operators or [kernel.duration for event in events[part] for kernel in event.kernels]
        rows |= {part: sum(kernels) / 1e3 / STEPS, f"launches: {part}": len(kernels) / STEPS}
    rows["loss / kernels"] = rows["loss"] / sum(rows[part] for part in in_a_step)
    waits = [
        event for part in in_a_step for event in events[part] if re.match("cuda(Memcpy|.*Synchronize)", event.name)
    ]
    rows["waits"] = sum(event.cpu_time_total for event in waits) / 1e3 / STEPS
    names = "\n".join(event.name for event in events["forward"])
    return rows | {"attention": re.findall(r"aten::_scaled_dot_product_(\w*)", names)[0]}


def within(events: list) -> tuple[dict[str, float], dict[str, list]]:
    """({part: seconds of its last call}, {part: what began on the host meanwhile, on whatever thread}).

    autograd has a thread of its own, which the profiler's sums of a range leave out.
    """
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.name in PARTS)
    found = {part: [] for part in PARTS}
    for event in events:
        around = [part for start, end, part in spans if start <= event.time_range.start < end]
        if around:  # of parts within parts, the inner one
            found[around[-1]].append(event)
    return {part: (end - start) / 1e6 for start, end, part in spans}, found
