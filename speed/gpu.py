"""The part gpu: what a card is asked, part by part.

    python bench.py gpu --seconds=535              every part of PARTS, in this order
    python bench.py gpu --parts=mixers,decode      these alone; the rows of earlier calls stay
    python bench.py gpu --rehearse                 on the CPU, tiny: whether every part runs, and no speed

Each part is a process of its own with a limit of seconds. Those that time nothing run side by side.
A row is a line of out_dir/gpu.jsonl as soon as it is known, so that a part or a call that is killed
keeps what it has. gpu.json and gpu.md hold the newest of each row, and gpu.log what the parts
print.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

import torch

import configurator
from base import files
from runs.outdir import ROOT, git_state
from speed import agreement, profiles, scripts, steps
from speed.config import BenchConfig
from speed.measure import Report
from speed.rows import NAME, Rows, newest

LOG = "gpu.log"
LEAST = 12  # seconds: with less left, a part is not begun
SLOWER = 20  # times the limit of a part, in a rehearsal


class Part(NamedTuple):
    measure: Callable  # of (BenchConfig, Rows)
    limit: int  # seconds
    is_timed: bool  # whether it measures speed, and runs alone


PARTS = {
    "card": Part(steps.card, 40, True),
    "agreement": Part(agreement.plain, 100, False),
    "agreement_compiled": Part(agreement.compiled, 140, False),
    "agreement_fla": Part(agreement.fla, 140, False),
    "scripts": Part(scripts.measure, 140, False),
    "step": Part(steps.step, 150, True),
    "mixers": Part(steps.mixers, 150, True),
    "decode": Part(steps.decode, 60, True),
    "profile": Part(profiles.measure, 90, True),
    "attention": Part(steps.attention_kernels, 40, True),
    "processes": Part(profiles.processes, 90, True),
}
PARTS |= {  # the compiler may take minutes: a process and a limit for each
    f"compiled_{mixer}": Part(functools.partial(steps.compiled_mixer, mixer), 60, True)
    for mixer in steps.RECURRENT
}


def bench_gpu(config: BenchConfig, report: Report) -> None:
    """Runs the parts that config names. Rows of earlier calls stay where it names some. Without a
    GPU it rehearses."""
    config = replace(config, rehearse=config.rehearse or config.device != "cuda")
    is_whole, file = "all" in config.parts, Path(config.out_dir) / NAME
    names = [name for name in PARTS if is_whole or name in config.parts]
    if is_whole:
        files.write_text(file, "")
        files.write_text(file.with_name(LOG), "")
    files.open_rows(file).close()  # a kill may have cut the last line short
    deadline = time.monotonic() + config.seconds
    try:
        for group in groups(names):
            run(config, group, deadline)
    finally:
        report.rows = newest(file)


def groups(names: list[str]) -> list[list[str]]:
    """The parts in the order in which they run: those that time nothing together, at the place of
    the first."""
    untimed = [name for name in names if not PARTS[name].is_timed]
    found = []
    for name in names:
        if PARTS[name].is_timed:
            found.append([name])
        elif name == untimed[0]:
            found.append(untimed)
    return found


def run(config: BenchConfig, names: list[str], deadline: float) -> None:
    """Runs parts side by side, each until it ends, its limit is over or the call's time is."""
    rows = Rows(config, "parts")
    about: dict = {
        "device": device_name(config),
        "torch": torch.__version__,
        "commit": git_state()["git_commit"],
    }
    if deadline - time.monotonic() < LEAST:
        for name in names:
            rows.write(name, outcome="skipped: no time left", **about)
        return
    each = replace(config, threads=max(1, config.threads // len(names)))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(files.open_to_append(Path(config.out_dir) / LOG))
        started = time.monotonic()
        running = {
            name: stack.enter_context(process_of(command_of(each, name), log)) for name in names
        }
        for name, process in running.items():
            limit = PARTS[name].limit * (SLOWER if config.rehearse else 1)
            outcome = wait_for(process, min(started + limit, deadline))
            rows.write(name, outcome=outcome, seconds=time.monotonic() - started, **about)


def device_name(config: BenchConfig) -> str:
    return torch.cuda.get_device_name() if config.device == "cuda" else config.device


def command_of(config: BenchConfig, name: str) -> list[str]:
    """The command of the process of a part."""
    words = [
        f"--parts={name}",
        f"--out_dir={Path(config.out_dir).resolve()}",
        f"--rehearse={config.rehearse}",
    ]
    words += [f"--{key}={getattr(config, key)}" for key in ("device", "dtype", "threads", "pairs")]
    words += [f"--against={Path(config.against).resolve()}"] if config.against else []
    return [sys.executable, "-m", "speed.gpu", *words]


@contextlib.contextmanager
def process_of(command: list[str], log: IO) -> Iterator[subprocess.Popen]:
    """The process of a part, which prints to the log. At the end it is killed, with all that it has
    started, such as the compiler's workers."""
    streams: dict = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(process: subprocess.Popen, deadline: float) -> str:
    """How the process has ended by then."""
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "stopped: ran past its limit"
    return "passed" if status == 0 else f"failed with status {status}; gpu.log says why"


def main(argv: list[str]) -> None:
    """The process of one part."""
    config = configurator.load(BenchConfig, argv, positional="what")
    (name,) = config.parts
    print(f"==== {name}", flush=True)
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")
    if config.rehearse:  # Inductor takes minutes on a busy CPU
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    PARTS[name].measure(config, Rows(config, name))


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
