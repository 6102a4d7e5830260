"""The parts profile and processes: a run of train.py under torch's profiler, and its speed in 1, 2
and 8 processes.

On a CPU the run is small, and rows that need a GPU say so.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from unittest import mock

import torch

import configurator
import model
import train
from base import files
from runs import checkpoint, hardware, memory, outdir
from speed.config import BenchConfig
from speed.rows import Rows
from speed.scripts import write_data

STEPS = 30  # behind the first one
RUN = "--max_iters=31 --eval_interval=31 --warmup_iters=1 --eval_whole=false --meters=false --compile=false"
ON_CPU = "--n_layer=2 --n_head=4 --n_embd=64 --block_size=64 --vocab_size=512 --batch_size=4 --eval_tokens=1000"
PARTS = {  # of a run, and where train.py finds the function. The first six make a step
    "data": (hardware.Processes, "to_device"),
    "forward": (train, "micro_loss"),  # but for the loss, which it calls
    "loss": (model, "cross_entropy_sum"),
    "backward": (torch.Tensor, "backward"),
    "clipping": (torch.nn.utils, "clip_grad_norm_"),
    "optimizer": (torch.optim.AdamW, "step"),
    "evaluation": (train, "evaluate"),
    "save": (checkpoint, "save"),
}
OF_A_STEP = list(PARTS)[:6]


def words_of(config: BenchConfig, folder: str) -> list[str]:
    """The words of the run, on a text that is written to the folder."""
    sizes = ["--vocab_size=50304"] if config.device == "cuda" else ON_CPU.split()
    words = [*RUN.split(), *sizes, f"--dataset={write_data(folder)}"]
    return words + [f"--{name}={getattr(config, name)}" for name in ("device", "dtype", "threads")]


def measure(config: BenchConfig, rows: Rows) -> None:
    """The part profile."""
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(config, folder)
        for name, value in (
            rows.attempt("profile", profiled, words, f"{folder}/run") or {}
        ).items():
            rows.predicted(name, value)
        if (n := rows.attempt("graphs", graphs, words)) is not None:
            rows.predicted("graphs", n)


def processes(config: BenchConfig, rows: Rows) -> None:
    """The part processes: tokens a second of one process, and of each of 2 and 8 as a share of
    that."""
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(config, folder)
        alone = rows.attempt("train.py", speed_of, words, folder, 1)
        if alone is not None:
            rows.predicted("train.py", alone)
        n_here = torch.cuda.device_count() if config.device == "cuda" else 2
        for n in (2, 8):
            name = f"{n} processes / 1"
            if n > n_here:
                rows.predicted(name, None, f"needs {n} GPUs")
                continue
            speed = rows.attempt(name, speed_of, words, folder, n)
            if speed is not None and alone is not None:
                rows.predicted(name, speed / alone)


def speed_of(words: list[str], folder: str, n: int) -> float:
    """Tokens a second of each of n processes that share a run: the best of its log. Raises
    UserError."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={n}",
            f"{outdir.ROOT}/train.py",
        ]
        words = [*words, f"--out_dir={out}", f"--gradient_accumulation_steps={n}"]
        ended = subprocess.run(
            [sys.executable, *launch, *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if ended.returncode:
            raise configurator.UserError(re.search(r"[^\n]*error[^\n]*|$", ended.stderr, re.I)[0])
        return (
            max(
                row.get("tokens_per_second", 0.0)
                for row in files.read_jsonl(f"{out}/metrics.jsonl")
            )
            / n
        )


def graphs(words: list[str]) -> int:
    config = configurator.load(train.TrainConfig, words)
    net = train.make_model(config, None, None)[0].to(config.device)
    idx = torch.zeros(2, 64, dtype=torch.long, device=config.device)
    return torch._dynamo.explain(net)(idx, idx).graph_count


def profiled(words: list[str], out: str) -> dict[str, float | str | None]:
    """Of a run in this process: ms of each part on the host, the last time; of a step, ms of
    kernels and launches."""
    is_gpu = "--device=cuda" in words
    with torch.profiler.profile() as profiler, contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = torch.profiler.record_function(part)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        check = stack.enter_context(mock.patch.object(memory, "check", wraps=memory.check))
        with contextlib.redirect_stdout(sys.stderr):
            train.main([*words, f"--out_dir={out}"])
    peak, estimate = torch.cuda.max_memory_allocated() or None, check.call_args.args[1]
    found: dict = {
        "ckpt.pt": os.path.getsize(f"{out}/ckpt.pt") / 1e9,
        "memory / estimate": peak and peak / estimate,
    }
    events, waited, total = within(profiler.events()), 0.0, 0.0
    for part in OF_A_STEP:
        times = []  # us of each kernel; on a CPU, of operators that call no others
        for event in events[part]:
            if is_gpu:
                times += [kernel.duration for kernel in event.kernels]
            elif not event.cpu_children:
                times.append(event.cpu_time_total)
            if re.match("cuda(Memcpy|.*Synchronize)", event.name):
                waited += event.cpu_time_total / 1e3 / STEPS
        found[part] = sum(times) / 1e3 / STEPS
        found[f"launches: {part}"] = len(times) / STEPS
        total += found[part]
    found |= {"kernels": total, "loss / kernels": found["loss"] / total, "waits": waited}
    for of_part in events.values():
        found |= {
            f"host: {event.name}": event.cpu_time_total / 1e3
            for event in of_part
            if event.name in PARTS
        }
    return found | {
        "attention": re.search(r"::_scaled_dot_product_(\w+)", str(events["forward"]))[1]
    }


def within(events: list) -> dict[str, list]:
    """{part: what began on the host during it, on whatever thread}: a range's own sums lack
    autograd's thread."""
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    calls = [(event.name, event.time_range) for event in events if event.name in PARTS]
    # behind the first step, which warms up
    calls = calls[[name for name, _ in calls].index("optimizer") + 1 :]
    found: dict[str, list] = {}
    for event in events:
        around = [part for part, span in calls if span.start <= event.time_range.start < span.end]
        # of a part in another one, the inner
        found.setdefault(around[-1] if around else "", []).append(event)
    return found
