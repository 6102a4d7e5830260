"""The part gpu: what the first hour on a GPU asks, beside what docs/gpu.md expects of an H100.

All of it is train.py, in out_dir: a run under torch's profiler, and runs under torchrun, whose
speeds are compared. On a CPU they are small, and rows that need a GPU say so."""

import contextlib
import functools
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
from data.pystdlib import prepare as pystdlib
from runs import checkpoint, hardware, memory, outdir
from speed.config import BenchConfig
from speed.costs import has_cache, of_any_length
from speed.measure import Report

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


def bench_gpu(config: BenchConfig, report: Report) -> None:
    is_gpu, text = (
        config.device == "cuda",
        (outdir.ROOT / "docs/gpu.md").read_text(encoding="utf-8"),
    )
    expected = {
        row: about
        for row, *about in re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|", text, re.M)
    }
    runs: dict = {"train.py": [(1,)], "compiled / plain": [(1, "--compile=true"), (1,)]}
    runs |= {f"{n} processes / 1": [(n,), (1,)] for n in (2, 8)}
    for mixer in (name for name in of_any_length() if not has_cache(name)):
        runs[f"fla / plain: {mixer}"] = [
            (1, f"--attention={mixer}", f"--kernels={of}") for of in ("fla", "torch")
        ]
    with (
        tempfile.TemporaryDirectory(dir=config.out_dir) as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        pystdlib.main(["--most_bytes=1_000_000", "--val_fraction=0.1", f"--out_dir={folder}/data"])
        words = [
            *RUN.split(),
            *(["--vocab_size=50304"] if is_gpu else ON_CPU.split()),
            f"--dataset={folder}/data",
        ]
        words += [f"--{name}={getattr(config, name)}" for name in ("device", "dtype", "threads")]
        speed = functools.cache(functools.partial(speed_of, words, folder))
        measures: dict = {
            "parts": lambda: profiled(words, f"{folder}/run"),
            "graphs": lambda: graphs(words),
        }
        measures |= {
            name: lambda of=of: speed(*of[0]) / (speed(*of[1]) if of[1:] else 1)
            for name, of in runs.items()
        }
        for measure_name, measure in measures.items():
            try:
                found, lacks = measure(), ""
            except Exception as error:  # it must not cost the other rows
                found, lacks = None, (str(error) or type(error).__name__).splitlines()[0][:200]
            for name, value in (
                found if isinstance(found, dict) else {measure_name: found}
            ).items():
                unit, *limits = expected.get(name) or expected.get(name.partition(":")[0]) or [""]
                agrees = lacks or ("needs a GPU" if value is None else "not compared")
                if is_gpu and limits and not lacks:
                    is_in = (
                        value in limits
                        if isinstance(value, str)
                        else float(limits[0]) <= value <= float(limits[1])
                    )
                    agrees = "yes" if is_in else "no"
                value = float(f"{value:.4g}") if isinstance(value, float) else value
                report.row(
                    row=name, measured=value, unit=unit, expected=", ".join(limits), agrees=agrees
                )


def page(about: dict, rows: list[dict]) -> str:
    lines = [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "| row | measured | unit | least, most expected of an H100 | agrees |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row.values()))} |" for row in rows), ""])


def speed_of(words: list[str], folder: str, n: int, *more: str) -> float:
    """Tokens a second of each of n processes that share a run: the best of its log. Raises
    UserError."""
    # raises for kernels that are not there
    config = configurator.load(train.TrainConfig, [*words, *more])
    if n > (
        torch.cuda.device_count()
        if config.device == "cuda"
        else 2
        if config.compile == "false"
        else 0
    ):
        raise configurator.UserError(f"needs {n} GPU{'s' * (n > 1)}")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={n}",
            f"{outdir.ROOT}/train.py",
        ]
        words = [*words, *more, f"--out_dir={out}", f"--gradient_accumulation_steps={n}"]
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
    net, idx = (
        train.make_model(config, None, None)[0].to(config.device),
        torch.zeros(2, 64, dtype=torch.long),
    )
    return torch._dynamo.explain(net)(idx.to(config.device), idx.to(config.device)).graph_count


def profiled(words: list[str], out: str) -> dict[str, float | str]:
    """Of a run in this process: ms of each part on the host, the last time; of a step, ms of
    kernels and launches."""
    with torch.profiler.profile() as profiler, contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = torch.profiler.record_function(part)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        check = stack.enter_context(mock.patch.object(memory, "check", wraps=memory.check))
        train.main([*words, f"--out_dir={out}"])
    peak, estimate = torch.cuda.max_memory_allocated() or None, check.call_args.args[1]
    rows: dict = {
        "ckpt.pt": os.path.getsize(f"{out}/ckpt.pt") / 1e9,
        "memory / estimate": peak and peak / estimate,
    }
    events, gpu, waited, total = within(profiler.events()), "--device=cuda" in words, 0.0, 0.0
    for part in list(PARTS)[:6]:
        of = events[part]  # t: us of each kernel; on a CPU, of operators that call no others
        t = (
            [k.duration for e in of for k in e.kernels]
            if gpu
            else [e.cpu_time_total for e in of if not e.cpu_children]
        )
        rows |= {part: sum(t) / 1e3 / STEPS, f"launches: {part}": len(t) / STEPS}
        waits = [e.cpu_time_total for e in of if re.match("cuda(Memcpy|.*Synchronize)", e.name)]
        waited, total = waited + sum(waits) / 1e3 / STEPS, total + rows[part]
    rows |= {"kernels": total, "loss / kernels": rows["loss"] / total, "waits": waited}
    rows |= {
        f"host: {e.name}": e.cpu_time_total / 1e3
        for of in events.values()
        for e in of
        if e.name in PARTS
    }
    return rows | {
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
