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

TRAINED = (
    "--n_layer=2 --n_head=4 --block_size=128 --batch_size=8 --dropout=0.1 --gate=elementwise "
    "--log_interval=1 --eval_tokens=5_000 --eval_whole=false --meters=false --learning_rate=1e-3"
)
READERS = {
    "sample.py": "--max_new_tokens=60 --num_samples=1 --start=def",
    "evaluate.py": "--lengths=64,128",
    "meters.py": "--rows=4",
}


def measure(config: BenchConfig, rows: Rows) -> None:
    n_steps, width = (12, 16) if config.rehearse else (200, 256)
    device = f"--device={config.device}"
    words = [*TRAINED.split(), device, f"--threads={config.threads}", f"--n_embd={width}"]
    words += [f"--max_iters={n_steps}", f"--eval_interval={n_steps // 2}"]
    with tempfile.TemporaryDirectory() as folder:
        data, muon = f"{folder}/data", f"{folder}/muon"
        with contextlib.redirect_stdout(sys.stderr):
            pystdlib.main(["--most_bytes=300_000", "--val_fraction=0.1", f"--out_dir={data}"])
        words.append(f"--dataset={data}")
        with rows.attempt("resume"):
            resume(rows, [*words, "--attention=gla,softmax", "--compile=false"], folder)
        words += ["--attention=softmax,gated_deltanet", "--optimizer=muon"]
        words += [f"--compile={config.device == 'cuda'}", f"--out_dir={muon}"]
        with rows.attempt("train, Muon"):
            script(rows, "train, Muon", "train.py", words)
        for name, more in READERS.items():
            with rows.attempt(name):
                words = [f"--checkpoint={muon}/ckpt.pt", device, *more.split()]
                script(rows, name, name, words)


def script(rows: Rows, row: str, name: str, words: list[str]) -> None:
    """Runs a script."""
    started = time.monotonic()
    status = subprocess.run([sys.executable, str(ROOT / name), *words]).returncode
    seconds = time.monotonic() - started
    rows.write(row, status=status, agrees=status == 0, seconds=seconds)


def resume(rows: Rows, words: list[str], folder: str) -> None:
    """A whole run, and one that SIGTERM stops behind its third step and that then goes on."""
    whole, stopped = f"{folder}/whole", f"{folder}/stopped"
    script(rows, "train", "train.py", [*words, f"--out_dir={whole}"])
    words.append(f"--out_dir={stopped}")
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words])
    while process.poll() is None and last_step(stopped) < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    status = process.wait()
    agrees = status == 128 + signal.SIGTERM
    rows.write("SIGTERM", status=status, agrees=agrees, step=last_step(stopped))
    script(rows, "resume", "train.py", [*words, "--init_from=resume"])
    ours = checkpoint.load(Path(whole))["model"]
    theirs = checkpoint.load(Path(stopped))["model"]
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    rows.write("resumed = whole", agrees=not differ, differ=", ".join(differ)[:200])


def last_step(folder: str) -> int:
    """The last training step in metrics.jsonl, or -1."""
    rows = files.read_jsonl(f"{folder}/metrics.jsonl")
    return max((row["step"] for row in rows if row["event"] == "train"), default=-1)
