"""The part data: rows, tokens, batches, and the start of a run."""

from configurator import UserError

import contextlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np

from data.mqar import prepare as mqar
from data.shards import open_dataset
from data.tokenizer import get_tokenizer
from runs.hardware import seconds_of
from speed.report import HERE, BenchConfig, Report, interleave, paired
from speed.training import tiny_step


def bench_data(config: BenchConfig, report: Report) -> None:
    """How long MQAR rows take, BPE tokens against tiktoken, the loader against a step, and the start of a run."""

    def make_rows():
        mqar.generate(np.random.default_rng(0), 100_000, 64, 4, vocab_size=8192)

    cpu = BenchConfig(device="cpu")
    seconds = statistics.median(interleave({"rows": make_rows}, config.long_pairs, cpu)["rows"])
    report.row(what="MQAR, 100,000 rows of 64", seconds=seconds, rows_s=1e5 / seconds)
    try:
        tokenizer = get_tokenizer("gpt2")
    except UserError as error:
        report.lines.append(f"BPE: not run, {error}")
    else:
        documents = [" ".join(f"word{i * j % 977} of the {i}th line\n" for j in range(200)) for i in range(500)]
        sides = {"ours": lambda: list(map(tokenizer.encode_array, documents))}
        sides["tiktoken"] = lambda: tokenizer._encoding.encode_ordinary_batch(documents, num_threads=1)
        seconds = interleave(sides, config.long_pairs, cpu)
        tokens = sum(len(tokenizer.encode_array(document)) for document in documents)
        for side, values in seconds.items():
            report.row(what=f"BPE, {side}", tokens_s=tokens / statistics.median(values))
        pairs = paired(seconds, "ours", "tiktoken")
        report.claim("BPE, ours / tiktoken alone", pairs, 1.2, at_most=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        mqar.main([f"--out_dir={folder}", "--train_size=20000", "--val_size=100", "--vocab_size=16", "--queries=2"])
        dataset, steps = open_dataset(folder), iter(range(1_000_000))
        step = tiny_step("ours", cpu)
        sides = {
            "loader": lambda: dataset.batch("train", next(steps), seed=0, batch_size=64, block_size=64),
            "step": step,
        }
        seconds = interleave(sides, config.pairs, cpu)
        pairs = paired(seconds, "loader", "step")
        report.row(what="loader", batches_s=1 / statistics.median(seconds["loader"]))
        report.claim("loader / the tiny model's step", pairs, 0.02, at_most=True)
        words = ["--n_layer=2", "--n_embd=64", "--n_head=4", "--block_size=64", "--device=cpu", "--max_iters=1"]
        words += [f"--dataset={folder}", f"--out_dir={folder}/out", "--overwrite=true"]
        command = [sys.executable, str(HERE / "train.py"), *words]
        starts = [seconds_of(lambda: subprocess.run(command, check=True, capture_output=True), "cpu") for _ in range(3)]
        report.row(what="train.py, start to end of one step", seconds=min(starts))
