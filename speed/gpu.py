"""The part gpu: what a card is asked, part by part.

    python bench.py gpu --seconds=535              every part of PARTS
    python bench.py gpu --parts=mixers,decode      these alone; the rows of earlier calls stay
    python bench.py gpu --rehearse                 on the CPU, tiny: whether every part runs

Each part is a process of its own with a limit of seconds. Those that time nothing run first, side
by side, and the others one by one. A row is a line of out_dir/gpu.jsonl as soon as it is known, so
that a part or a call that is killed keeps what it has.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from speed import agreement, scripts, steps
from speed.config import BenchConfig
from speed.measure import RECURRENT
from speed.rows import Rows

LEAST = 12  # seconds: with less left, a part is not begun
SLOWER = 20  # times the limit of a part, in a rehearsal
UNTIMED = {  # {part: (what it calls, with BenchConfig and Rows; its limit in seconds)}
    "agreement": (functools.partial(agreement.measure, "torch", False), 100),
    "agreement_compiled": (functools.partial(agreement.measure, "torch", True), 140),
    "agreement_fla": (functools.partial(agreement.measure, "auto", False), 140),
    "agreement_fla_compiled": (functools.partial(agreement.measure, "auto", True), 140),
    "scripts": (scripts.measure, 140),
}
ALL = ("softmax", *RECURRENT)
COMPARED = ("softmax", "gla", "mamba2", "gated_deltanet")
TIMED = {
    "step": (steps.step, 150),
    "decode": (steps.decode, 60),
    "mixers": (functools.partial(steps.mixers, ALL, (4096, 16_384, 1024), "auto", False), 100),
    "mixers_compiled": (
        functools.partial(steps.mixers, COMPARED, (4096, 16_384), "auto", True),
        240,
    ),
    "profile": (steps.profile, 90),
    "mixers_torch": (functools.partial(steps.mixers, RECURRENT, (1024,), "torch", False), 60),
}
PARTS = UNTIMED | TIMED


def gpu(config: BenchConfig, rows: Rows) -> None:
    """Runs the parts that config names. Without a GPU it rehearses."""
    config = replace(config, rehearse=config.rehearse or config.device != "cuda")
    names = list(PARTS) if "all" in config.parts else config.parts
    deadline = time.monotonic() + config.seconds
    run(config, [name for name in UNTIMED if name in names], deadline)
    for name in TIMED:
        if name in names:
            run(config, [name], deadline)


def run(config: BenchConfig, names: list[str], deadline: float) -> None:
    """Runs parts side by side, each until it ends, its limit is over or the call's time is. At the
    end each is killed with all that it has started, such as the compiler's workers."""
    rows = Rows(config, "parts", "gpu")
    started = time.monotonic()
    processes = {}
    try:
        for name in names:
            if deadline - started < LEAST:
                rows.write(name, outcome="skipped: no time left")
                continue
            each = replace(config, threads=max(1, config.threads // len(names)))
            call = (PARTS[name][0], each, name)
            processes[name] = multiprocessing.get_context("spawn").Process(target=part, args=call)
            processes[name].start()
        for name, process in processes.items():
            limit = PARTS[name][1] * (SLOWER if config.rehearse else 1)
            end = min(started + limit, deadline)
            process.join(max(0.0, end - time.monotonic()))
            known = {None: "stopped: ran past its limit", 0: "passed"}
            outcome = known.get(process.exitcode, f"failed with status {process.exitcode}")
            rows.write(name, outcome=outcome, seconds=time.monotonic() - started)
    finally:
        for process in processes.values():
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def part(measure: Callable, config: BenchConfig, name: str) -> None:
    """The process of one part."""
    os.setsid()  # a group, which can be killed
    print(f"==== {name}", flush=True)
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")
    if config.rehearse:  # Inductor takes minutes on a busy CPU
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    measure(config, Rows(config, name, "gpu"))
