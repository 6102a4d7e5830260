"""Whether the scripts work on this card: a run that SIGTERM stops goes on to the same bits, Muon
trains, compiled where there is a GPU, and sample.py, evaluate.py and meters.py read what they
wrote."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from base import files
from data.pystdlib import prepare as pystdlib
from runs import checkpoint
from runs.outdir import ROOT
from speed.config import BenchConfig
from speed.rows import Rows

TRAINED = "--n_layer=2 --n_head=4 --block_size=128 --batch_size=8 --dropout=0.1 --gate=elementwise --log_interval=1"
OTHERS = "--eval_tokens=5_000 --eval_whole=false --meters=false --learning_rate=1e-3"
LONGEST = 100  # seconds that a script may take


def write_data(folder: str, n_bytes: int = 1_000_000) -> str:
    """A text of so many bytes, of Python's standard library. Returns its folder."""
    with contextlib.redirect_stdout(sys.stderr):
        pystdlib.main([f"--most_bytes={n_bytes}", "--val_fraction=0.1", f"--out_dir={folder}/data"])
    return f"{folder}/data"


def measure(config: BenchConfig, rows: Rows) -> None:
    n_steps, width = (12, 16) if config.rehearse else (200, 256)
    on_device = [f"--device={config.device}", f"--threads={config.threads}"]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *TRAINED.split(),
            *OTHERS.split(),
            f"--dataset={write_data(folder, 300_000)}",
            *on_device,
        ]
        words += [f"--n_embd={width}", f"--max_iters={n_steps}", f"--eval_interval={n_steps // 2}"]
        for attention in ("softmax", "gla,softmax"):
            own = [*words, f"--attention={attention}", "--compile=false"]
            rows.attempt(
                f"resume, {attention}",
                resume,
                config,
                rows,
                own,
                attention,
                f"{folder}/{attention}",
            )
        muon = [
            "--attention=softmax,gated_deltanet",
            "--optimizer=muon",
            f"--out_dir={folder}/muon",
        ]
        muon.append(f"--compile={config.device == 'cuda'}")
        rows.attempt("train, Muon", script, config, rows, "train, Muon", "train.py", *words, *muon)
        of_muon = [f"--checkpoint={folder}/muon/ckpt.pt", f"--device={config.device}"]
        for name, *more in (
            ("sample.py", "--max_new_tokens=60", "--num_samples=1", "--start=def "),
            ("evaluate.py", "--lengths=64,128"),
            ("meters.py", "--rows=4"),
        ):
            rows.attempt(name, script, config, rows, name, name, *of_muon, *more)


def script(config: BenchConfig, rows: Rows, row: str, name: str, *words: str) -> None:
    """Runs a script. The row has its status, its last line and, of train.py, what ran."""
    started = time.monotonic()
    command, limit = (
        [sys.executable, str(ROOT / name), *words],
        LONGEST * (10 if config.rehearse else 1),
    )
    ended = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=limit
    )
    print(
        f"$ python {name} {' '.join(words)}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}",
        flush=True,
    )
    form = re.findall(r"^recurrence: (.*)$", ended.stdout, re.M)
    about = {"form": "; ".join(form)} if form else {}
    rows.write(
        row,
        status=ended.returncode,
        agrees=ended.returncode == 0,
        seconds=time.monotonic() - started,
        **about,
    )


def resume(config: BenchConfig, rows: Rows, words: list[str], attention: str, folder: str) -> None:
    """A whole run, and one that SIGTERM stops in the middle and that then goes on."""
    script(config, rows, f"train, {attention}", "train.py", *words, f"--out_dir={folder}-whole")
    status, step = stopped([*words, f"--out_dir={folder}-stopped"], f"{folder}-stopped")
    rows.write(
        f"SIGTERM, {attention}", status=status, agrees=status == 128 + signal.SIGTERM, step=step
    )
    again = ["--init_from=resume", f"--out_dir={folder}-stopped", f"--device={config.device}"]
    script(config, rows, f"resume, {attention}", "train.py", *again)
    whole, resumed = (tensors_of(f"{folder}-{name}") for name in ("whole", "stopped"))
    distances = [
        float((a.double() - b.double()).abs().max()) for a, b in zip(whole, resumed, strict=True)
    ]
    differ = sum(not torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    rows.write(
        f"resumed = whole, {attention}", agrees=not differ, differ=differ, most=max(distances)
    )


def tensors_of(folder: str) -> list[torch.Tensor]:
    """Weights and moments of a run."""
    found = checkpoint.load(Path(folder))
    return [
        x
        for x in tree_leaves([found["model"], found["optimizer"]])
        if isinstance(x, torch.Tensor) and x.numel()
    ]


def stopped(words: list[str], folder: str) -> tuple[int, int]:
    """Sends SIGTERM to a run behind its third step. Returns (status, the last step that was
    logged)."""
    command, deadline = [sys.executable, str(ROOT / "train.py"), *words], time.monotonic() + LONGEST
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and last_step(folder) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    return process.wait(LONGEST), last_step(folder)


def last_step(folder: str) -> int:
    """The last training step in metrics.jsonl, or -1."""
    rows = files.read_jsonl(Path(folder) / "metrics.jsonl")
    return max((row["step"] for row in rows if row["event"] == "train"), default=-1)
