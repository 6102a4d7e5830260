"""The part gaterun: which recipes of ours reach nanoGPT's final loss, and in which share of its
processor time.

nanoGPT's model and optimizer train by its own recipe for a CPU, and ours by the recipes below, on
the same megabyte of Python's standard library. Each run has one thread and a process of its own,
and a seed's runs follow each other. Only steps are on the clock: neither data nor evaluations. The
loss is that of the whole validation split in windows of 64. Rules and records:
results/gaterun/README.md.
"""

import contextlib
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import torch

from base import configurator
from base.configurator import UserError
from data.pystdlib import prepare as pystdlib
from data.shards import open_dataset
from keys import TrainConfig
from model import GPT
from ops import IGNORE
from speed import ideas
from speed.config import BenchConfig
from speed.measure import NANOGPT, Side, in_new_processes
from speed.rows import Rows
from study.stats import sign_flip_test
from train import learning_rate, model_args

OF_NANOGPT = "config/shakespeare_char.py"  # its recipe for a CPU, by our names
SIZES = ("n_layer", "n_head", "n_embd", "block_size")  # those of our keys that are nanoGPT's, too
CONTEXT = 64
MOST_PARAMETERS = 828_544  # nanoGPT's, with 256 ids
TWO = "config/gaterun.py --n_layer=2 --ngram_rows=3700"
RECIPES = {  # {name: the words behind `train.py`}; ideas.py has what some edit besides
    "AdamW": "config/shakespeare_char.py --max_iters=1050 --learning_rate=2e-3 --min_lr=1e-4",
    "the record before": "config/gaterun.py --n_layer=2 --n_embd=160 --ngram_rows=0 --gate=none "
    "--match_params=false --batch_size=12 --max_iters=240 --learning_rate=12e-3 "
    "--muon_lr_scale=1.5 --min_lr=6e-4 --warmup_iters=12",
    "record": "config/gaterun.py",
    "with AdamW": "config/gaterun.py --optimizer=adamw",
    "half of the rate": "config/gaterun.py --learning_rate=5e-3 --min_lr=1e-3",
    "twice the rate": "config/gaterun.py --learning_rate=2e-2 --min_lr=4e-3",
    "a decay to zero": "config/gaterun.py --min_lr=0",
    "wsd": "config/gaterun.py --schedule=wsd --decay_iters=38 --min_lr=2e-3",
    "half of the batch and twice the steps": "config/gaterun.py --batch_size=16 --max_iters=150",
    "without n-grams": "config/gaterun.py --ngram_rows=0",
    "without the convolution": "config/gaterun.py --short_conv=0",
    "without QK-norm": "config/gaterun.py --qk_norm=false",
    "without the gate": "config/gaterun.py --gate=none",
    "a gate from one": "config/gaterun.py --gate_activation=sigmoid2",
    "a gate of 12 channels": "config/gaterun.py --gate_width=12",
    "a headwise gate": "config/gaterun.py --gate=headwise",
    "gates by AdamW": "config/gaterun.py --gate_optimizer=adamw",
    "Muon by head": "config/gaterun.py --muon_split=head",
    "XSA": "config/gaterun.py --attention=xsa",
    "Gated DeltaNet": "config/gaterun.py --attention=gated_deltanet --gate=native",
    "two layers": TWO,
    "two layers and a value residual": f"{TWO} --attention=residual_values",
    "two layers and the embedding again": TWO,
    "ReLU squared": "config/gaterun.py --mlp=relu_squared",
    "half of the channels rotated": "config/gaterun.py --attention=half_rope",
    "value embeddings": "config/gaterun.py --attention=value_embedded --ngram_rows=3800",
    "soft-capped logits": "config/gaterun.py",
    "an output layer of its own from zero": "config/gaterun.py --tie_embeddings=false --ngram_rows=3800",
    "32 tokens first": "config/gaterun.py",
    "a growing batch": "config/gaterun.py",
    "four times as long": "config/gaterun.py --max_iters=300 --warmup_iters=16",
    "four times as long without the gate": "config/gaterun.py --max_iters=300 --warmup_iters=16 --gate=none",
}
LONG = (
    "config/gaterun.py --n_layer=3 --n_head=4 --n_embd=128 --ngram_rows=500 --dropout=0.1 "
    "--batch_size=24 --max_iters=1300 --warmup_iters=30 --learning_rate=6e-3 --muon_lr_scale=2 "
    "--min_lr=0"
)
LOWEST = {  # of the second track: the lowest loss in 1.5 times nanoGPT's processor time
    "lowest": LONG,
    "lowest without the gate": f"{LONG} --gate=none",
}


def gaterun(config: BenchConfig, rows: Rows) -> None:
    wanted = [*config.recipes, *(RECIPES if "all" in config.recipes else [])]
    names = [name for name in RECIPES | LOWEST if name in wanted]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            pystdlib.main(
                ["--most_bytes=1_000_000", "--val_fraction=0.1", "--seed=0", f"--out_dir={folder}"]
            )
        text = {}
        for name, split in open_dataset(folder).meta["splits"].items():
            text[name] = split["shards"][0]["sha256"]
        rows.write("text", sha256_of_text=text, python=platform.python_version())
        tasks = []
        for seed in config.seeds:
            for name in (NANOGPT, *names):
                tasks.append((config, folder, seed, name))
        found = in_new_processes(run_of, tasks, at_once=config.threads)
    theirs = [run for run in found if run["side"] == NANOGPT]
    for name in (NANOGPT, *names):
        ours = [run for run in found if run["side"] == name]
        losses = [run["val_loss"] for run in ours]
        gains = [a["val_loss"] - b["val_loss"] for a, b in zip(theirs, ours, strict=True)]
        seconds = [run["cpu_seconds"] for run in ours]
        rows.write(
            name,
            steps=ours[0]["steps"],
            parameters=ours[0]["parameters"],
            cpu_seconds=statistics.fmean(seconds),
            val_loss=statistics.fmean(losses),
            spread=statistics.stdev(losses) if len(losses) > 1 else 0.0,
            p=sign_flip_test(gains, alternative="greater"),
            command=(RECIPES | LOWEST).get(name),
            runs=ours,
        )
        if name != NANOGPT and len(ours) > 5:
            of_theirs = [run["cpu_seconds"] for run in theirs]
            rows.ratio(f"{name}: processor time, ours / nanoGPT's", seconds, of_theirs)


def run_of(config: BenchConfig, folder: str, seed: int, name: str) -> dict:
    """Trains one side with one seed."""
    torch.set_num_threads(1)
    configurator.set_up()
    ideas.register()
    words = (RECIPES | LOWEST).get(name, OF_NANOGPT)
    train = configurator.load(TrainConfig, words.split())
    dataset = open_dataset(folder)
    for key, value in (("block_size", CONTEXT), ("gradient_accumulation_steps", 1)):
        if getattr(train, key) != value:
            raise UserError(
                f"{key}={getattr(train, key)}: a recipe of the gate run has {value}, as nanoGPT's"
            )
    keys = model_args(train)
    attention = keys.pop("attention")
    if name == NANOGPT:
        attention = NANOGPT
        keys = {key: keys[key] for key in SIZES}
    keys["vocab_size"] = dataset.vocab_size
    gpt = ideas.GPTS.get(name, GPT)
    side = Side(config, attention, train=replace(train, seed=seed), gpt=gpt, **keys)
    parameters = sum(p.numel() for p in side.model.parameters())
    if name != NANOGPT and parameters > MOST_PARAMETERS:
        raise UserError(
            f"{name}: {parameters:,} parameters are more than nanoGPT's {MOST_PARAMETERS:,}"
        )
    seconds = 0.0
    for step in range(train.max_iters):
        rows, length = train.batch_size, train.block_size
        if name in ideas.SIZES:
            rows, length = ideas.SIZES[name](step, train)
        batch = dataset.batch("train", step, seed=seed, batch_size=rows, block_size=length)
        side.batch = batch[:2]
        start = time.process_time()
        for optimizer in side.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.get("lr_scale", 1.0) * learning_rate(train, step)
        side()
        seconds += time.process_time() - start
    total = labels = 0
    side.model.eval()
    with torch.no_grad():
        for x, y, *_ in dataset.eval_batches("val", 64, CONTEXT):
            n = int((y != IGNORE).sum())
            side.batch = (x, y.clamp(min=-1) if name == NANOGPT else y)  # its number for no label
            total += n * float(side.loss())
            labels += n
    return dict(
        side=name,
        seed=seed,
        steps=train.max_iters,
        parameters=parameters,
        cpu_seconds=seconds,
        val_loss=total / labels,
    )
