"""Whether the scripts work on this card: a run that SIGTERM stops goes on to the same bits, Muon
trains, compiled where there is a GPU, and sample.py, evaluate.py and meters.py read what they
wrote."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from base import files
from data.pystdlib import prepare as pystdlib
from runs import checkpoint
from runs.outdir import ROOT
from speed.config import BenchConfig
from speed.rows import Rows

TRAINED = "--n_layer=2 --n_head=4 --block_size=128 --batch_size=8 --dropout=0.1 --gate=elementwise --log_interval=1"
OTHERS = "--eval_tokens=5_000 --eval_whole=false --meters=false --learning_rate=1e-3"
READERS = {
    "sample.py": "--max_new_tokens=60 --num_samples=1 --start=def",
    "evaluate.py": "--lengths=64,128",
    "meters.py": "--rows=4",
}
LONGEST = 100  # seconds that a script may take
SLOWER = 10  # times that, in a rehearsal


def measure(config: BenchConfig, rows: Rows) -> None:
    n_steps, width = (12, 16) if config.rehearse else (200, 256)
    device = f"--device={config.device}"
    words = [*TRAINED.split(), *OTHERS.split(), device, f"--threads={config.threads}"]
    words += [f"--n_embd={width}", f"--max_iters={n_steps}", f"--eval_interval={n_steps // 2}"]
    with tempfile.TemporaryDirectory() as folder:
        data, muon = f"{folder}/data", f"{folder}/muon"
        with contextlib.redirect_stdout(sys.stderr):
            pystdlib.main(["--most_bytes=300_000", "--val_fraction=0.1", f"--out_dir={data}"])
        words.append(f"--dataset={data}")
        for attention in ("softmax", "gla,softmax"):
            ours = [*words, f"--attention={attention}", "--compile=false"]
            rows.attempt(attention, resume, config, rows, attention, ours, f"{folder}/{attention}")
        words += ["--attention=softmax,gated_deltanet", "--optimizer=muon"]
        words += [f"--compile={config.device == 'cuda'}", f"--out_dir={muon}"]
        rows.attempt("train, Muon", script, config, rows, "train, Muon", "train.py", words)
        for name, more in READERS.items():
            words = [f"--checkpoint={muon}/ckpt.pt", device, *more.split()]
            rows.attempt(name, script, config, rows, name, name, words)


def script(config: BenchConfig, rows: Rows, row: str, name: str, words: list[str]) -> None:
    """Runs a script."""
    started = time.monotonic()
    limit = LONGEST * (SLOWER if config.rehearse else 1)
    status = subprocess.run([sys.executable, str(ROOT / name), *words], timeout=limit).returncode
    seconds = time.monotonic() - started
    rows.write(row, status=status, agrees=status == 0, seconds=seconds)


def resume(config: BenchConfig, rows: Rows, attention: str, words: list[str], folder: str) -> None:
    """A whole run, and one that SIGTERM stops behind its third step and that then goes on."""
    whole, stopped = f"{folder}-whole", f"{folder}-stopped"
    script(config, rows, f"train, {attention}", "train.py", [*words, f"--out_dir={whole}"])
    command = [sys.executable, str(ROOT / "train.py"), *words, f"--out_dir={stopped}"]
    process = subprocess.Popen(command)
    while process.poll() is None and last_step(stopped) < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    status = process.wait(LONGEST)
    agrees = status == 128 + signal.SIGTERM
    rows.write(f"SIGTERM, {attention}", status=status, agrees=agrees, step=last_step(stopped))
    words = ["--init_from=resume", f"--out_dir={stopped}", f"--device={config.device}"]
    script(config, rows, f"resume, {attention}", "train.py", words)
    ends = [checkpoint.load(Path(out_dir))["model"] for out_dir in (whole, stopped)]
    differ = [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])]
    row = f"resumed = whole, {attention}"
    rows.write(row, agrees=not differ, differ=", ".join(differ)[:200])


def last_step(folder: str) -> int:
    """The last training step in metrics.jsonl, or -1."""
    rows = files.read_jsonl(f"{folder}/metrics.jsonl")
    return max((row["step"] for row in rows if row["event"] == "train"), default=-1)
