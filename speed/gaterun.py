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
from ops import IGNORE
from speed.config import BenchConfig
from speed.measure import NANOGPT, Side, in_new_processes
from speed.rows import Rows
from study.stats import sign_flip_test
from train import learning_rate, model_args

OF_NANOGPT = "config/shakespeare_char.py"  # its recipe for a CPU, by our names
SIZES = ("n_layer", "n_head", "n_embd", "block_size")  # those of our keys that are nanoGPT's, too
CONTEXT = 64
MOST_PARAMETERS = 828_544  # nanoGPT's, with 256 ids
LONG = "--max_iters=960 --warmup_iters=48"
TWICE = "--batch_size=24 --max_iters=120 --warmup_iters=6"
GATE = "--gate=elementwise --match_params=true"
FROM_ONE = f"{GATE} --gate_activation=sigmoid2"
NATIVE = "--gate=native"
RECIPES = {  # {name: the words behind `train.py`}; each row of the table can be run by itself
    "AdamW": "config/shakespeare_char.py --max_iters=1050 --learning_rate=2e-3 --min_lr=1e-4",
    "record": "config/gaterun.py",
    "with AdamW": "config/gaterun.py --optimizer=adamw --learning_rate=2.5e-3 --min_lr=1.25e-4",
    "a third of the rate": "config/gaterun.py --learning_rate=4e-3 --min_lr=2e-4",
    "without the convolution": "config/gaterun.py --short_conv=0",
    "without QK-norm": "config/gaterun.py --qk_norm=false",
    "RoPE's usual base": "config/gaterun.py --rope_base=10_000",
    "four layers of 128": "config/gaterun.py --n_layer=4 --n_embd=128 --n_head=4",
    "wsd": "config/gaterun.py --schedule=wsd --decay_iters=120",
    "twice the batch, half the steps": f"config/gaterun.py {TWICE}",
    "out_proj from near zero": "config/gaterun.py --out_init_scale=0.01",
    "Gated DeltaNet": f"config/gaterun.py --attention=gated_deltanet {NATIVE}",
    "Gated DeltaNet, then softmax": f"config/gaterun.py --attention=gated_deltanet,softmax {NATIVE}",
    "a gate from a half": f"config/gaterun.py {GATE}",
    "a gate from one": f"config/gaterun.py {FROM_ONE}",
    "four times as long": f"config/gaterun.py {LONG}",
    "four times as long, a gate from one": f"config/gaterun.py {LONG} {FROM_ONE}",
}


def gaterun(config: BenchConfig, rows: Rows) -> None:
    names = [name for name in RECIPES if name in config.recipes or "all" in config.recipes]
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
            command=RECIPES.get(name),
            runs=ours,
        )
        if name != NANOGPT and len(ours) > 5:
            of_theirs = [run["cpu_seconds"] for run in theirs]
            rows.ratio(f"{name}: processor time, ours / nanoGPT's", seconds, of_theirs)


def run_of(config: BenchConfig, folder: str, seed: int, name: str) -> dict:
    """Trains one side with one seed."""
    torch.set_num_threads(1)
    configurator.set_up()
    train = configurator.load(TrainConfig, RECIPES.get(name, OF_NANOGPT).split())
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
    side = Side(config, attention, train=replace(train, seed=seed), **keys)
    parameters = sum(p.numel() for p in side.model.parameters())
    if name != NANOGPT and parameters > MOST_PARAMETERS:
        raise UserError(
            f"{name}: {parameters:,} parameters are more than nanoGPT's {MOST_PARAMETERS:,}"
        )
    of_run = dict(seed=seed, batch_size=train.batch_size, block_size=CONTEXT)
    seconds = 0.0
    for step in range(train.max_iters):
        side.batch = dataset.batch("train", step, **of_run)[:2]
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
