"""The part data: rows, tokens, batches, the start of a run, and the share of it that evaluations take."""

from configurator import UserError

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from data.mqar import prepare as mqar
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from runs.hardware import seconds_of
from speed.loss import prepare as prepare_text
from speed.report import HERE, BenchConfig, Report, interleave, paired
from speed.training import tiny_step
from train import TrainConfig

ROWS, LOOPED = 100_000, 2_000  # MQAR rows that are made at once, and those that a loop makes, whose time is scaled
STEPS = 100  # of the text run whose evaluations are timed


def bench_data(config: BenchConfig, report: Report) -> None:
    """How long MQAR rows, BPE tokens and batches take, the start of a run, and its evaluations."""
    cpu = BenchConfig(device="cpu")
    mqar_rows(config, report, cpu)
    bpe_tokens(config, report, cpu)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        mqar.main([f"--out_dir={folder}", "--train_size=20000", "--val_size=100", "--vocab_size=16", "--queries=2"])
        loader(config, report, cpu, folder)
        first_step(config, report, folder)
    with tempfile.TemporaryDirectory() as folder:
        prepare_text(folder)
        evaluations(config, report, folder)


def mqar_rows(config: BenchConfig, report: Report, cpu: BenchConfig) -> None:
    """Rows of 64 tokens and 4 pairs, against a loop that makes one row after the other."""
    sides = {
        "ours": lambda: mqar.generate(np.random.default_rng(0), ROWS, 64, 4, vocab_size=8192),
        "loop": lambda: [one_row(rng, 64, 4, 8192) for rng in [np.random.default_rng(0)] for _ in range(LOOPED)],
    }
    seconds = interleave(sides, config.long_pairs, cpu)
    median = statistics.median(seconds["ours"])
    report.row(what=f"MQAR, {ROWS:,} rows of 64", seconds=median, rows_s=ROWS / median)
    pairs = [(ROWS / LOOPED * loop, ours) for loop, ours in paired(seconds, "loop", "ours")]
    report.claim(f"MQAR, {ROWS:,} rows of 64, a Python loop / ours", pairs, 50)


def one_row(rng: np.random.Generator, seq_len: int, pairs: int, vocab_size: int) -> np.ndarray:
    """(2, seq_len) tokens and labels: a row as data/mqar/prepare.py describes it, with power 0.01 and zero filler."""
    keys = 1 + rng.choice(vocab_size // 2 - 1, pairs, replace=False)
    values = vocab_size // 2 + rng.choice(vocab_size - vocab_size // 2, pairs, replace=False)
    slots = seq_len // 2 - pairs
    chance = np.arange(1, slots + 1) ** (0.01 - 1)
    places = rng.choice(slots, pairs, replace=False, p=chance / chance.sum())
    row = np.zeros((2, seq_len), np.uint16)
    row[0, 0 : 2 * pairs : 2], row[0, 1 : 2 * pairs : 2] = keys, values
    for place, asked, answer in zip(places, keys, values, strict=True):
        position = 2 * pairs + 2 * place
        row[0, position], row[1, position] = asked, answer
    return row


def bpe_tokens(config: BenchConfig, report: Report, cpu: BenchConfig) -> None:
    try:
        tokenizer = get_tokenizer("gpt2")
    except UserError as error:
        report.lines.append(f"BPE: not run, {error}")
        return
    documents = [" ".join(f"word{i * j % 977} of the {i}th line\n" for j in range(200)) for i in range(500)]
    sides = {"ours": lambda: list(map(tokenizer.encode_array, documents))}
    sides["tiktoken"] = lambda: tokenizer._encoding.encode_ordinary_batch(documents, num_threads=1)
    seconds = interleave(sides, config.long_pairs, cpu)
    tokens = sum(len(tokenizer.encode_array(document)) for document in documents)
    for side, values in seconds.items():
        report.row(what=f"BPE, {side}", tokens_s=tokens / statistics.median(values))
    pairs = paired(seconds, "ours", "tiktoken")
    report.claim("BPE, ours / tiktoken alone", pairs, 1.2, at_most=True)


def loader(config: BenchConfig, report: Report, cpu: BenchConfig, folder: str) -> None:
    dataset, steps = open_dataset(folder), iter(range(1_000_000))
    sides = {
        "loader": lambda: dataset.batch("train", next(steps), seed=0, batch_size=64, block_size=64),
        "step": tiny_step("softmax", cpu),
    }
    seconds = interleave(sides, config.pairs, cpu)
    report.row(what="loader", batches_s=1 / statistics.median(seconds["loader"]))
    report.claim("loader / the tiny model's step", paired(seconds, "loader", "step"), 0.02, at_most=True)


def first_step(config: BenchConfig, report: Report, folder: str) -> None:
    """The whole process of a run of one step, 2 x 64, from its start to its end: at most 2 s."""
    words = ["--n_layer=2", "--n_embd=64", "--n_head=4", "--block_size=64", "--max_iters=1"]
    starts = [seconds_of(lambda: run_training(folder, *words), "cpu") for _ in range(config.long_pairs)]
    report.row(what="train.py, start to end of one step", seconds=statistics.median(starts))
    report.claim("train.py, start to end of one step, seconds", [(s, 1.0) for s in starts], 2, at_most=True)


def evaluations(config: BenchConfig, report: Report, folder: str) -> None:
    """The share of evaluations in a text run of 4 x 128, T = 256, B = 8, with the default keys of evaluations.

    A run of STEPS steps evaluates at its start and at its end. Its seconds without these are scaled to the steps of a
    default run, 5,000, and those of an evaluation to the evaluations of one, every 500 steps and at step 0. The
    validation text has no more than the default eval_tokens: no run reads another, whole one at its end.
    """
    words = ["--n_layer=4", "--n_embd=128", "--n_head=4", "--block_size=256", "--batch_size=8"]
    words += [f"--max_iters={STEPS}", f"--eval_interval={STEPS}"]
    n_evaluations, pairs = 1 + TrainConfig.max_iters // TrainConfig.eval_interval, []
    for _ in range(config.long_pairs):
        end = run_training(folder, *words)
        evaluating = end["eval_seconds"] / 2 * n_evaluations
        stepping = (end["seconds"] - end["eval_seconds"]) * TrainConfig.max_iters / STEPS
        pairs.append((evaluating, evaluating + stepping))
        report.row(what=f"text run of {STEPS} steps", seconds=end["seconds"], eval_seconds=end["eval_seconds"])
    report.claim("evaluations / a text run of 4 x 128", pairs, 0.1, at_most=True)


def run_training(folder: str, *words: str) -> dict:
    """Runs train.py on the CPU, in a process of its own, on the data in the folder. Returns its last row."""
    out_dir = Path(folder) / "out"
    words = (*words, f"--dataset={folder}", f"--out_dir={out_dir}", "--overwrite=true", "--device=cpu")
    subprocess.run([sys.executable, str(HERE / "train.py"), *words], check=True, capture_output=True)
    return json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])
