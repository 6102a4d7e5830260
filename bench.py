"""Measures speed and memory; prints what it finds, and writes it to a file per part.

    python bench.py gpu                            whether a GPU computes the same, and how fast
    python bench.py all --against=PATH/model.py    every part, beside nanoGPT's own model.py

Absolute times of a shared machine mean little: here two sides run in turn in one process, with the
same number of threads, and their order changes from pair to pair. What is reported is the median of
the paired ratios, and its 95% interval by order statistics (no assumption about the noise). A row
is a line of out_dir/PART.jsonl as soon as it is known, a ratio with its raw pairs.
"""

from base import configurator
from speed.config import BenchConfig

configurator.begin(__name__, BenchConfig, positional="what")

import platform
import sys
from pathlib import Path

import torch

from base import files
from base.configurator import UserError, check_choice
from runs.hardware import cpu_threads, gemm_rate, pick_device, pick_dtype, signals_to
from runs.outdir import git_state
from speed import costs
from speed.gaterun import LOWEST, RECIPES, gaterun
from speed.gpu import PARTS as PARTS_OF_GPU
from speed.gpu import gpu
from speed.rows import Rows

PARTS = dict(
    train=costs.train,
    overhead=costs.overhead,
    length=costs.length,
    packing=costs.packing,
    decode=costs.decode,
    ops=costs.ops,
    gaterun=gaterun,
    gpu=gpu,
)
BESIDE_NANOGPT = {"train", "gaterun", "all"}


def main(argv: list[str]) -> None:
    config = configurator.load(BenchConfig, argv, positional="what")
    for key, known in (("what", PARTS), ("parts", PARTS_OF_GPU)):
        for name in getattr(config, key):
            check_choice(key, name, (*known, "all"))
    for name in config.recipes:
        if name not in (*RECIPES, *LOWEST, "all"):
            raise UserError(f"recipes={name!r}: speed/gaterun.py lists them")
    if config.against:
        files.find_path(config.against)
    elif BESIDE_NANOGPT & set(config.what):
        raise UserError(
            "against=None: train and gaterun run nanoGPT, too; add --against=PATH of its model.py"
        )
    config.threads = cpu_threads(config.threads)
    torch.set_num_threads(config.threads)
    config.device = "cpu" if config.rehearse else pick_device(config.device)
    config.dtype = pick_dtype(config.dtype, config.device)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")  # for all sides, as train.py and nanoGPT's do
    files.claim(Path(config.out_dir), "bench", config.overwrite)
    about = describe(config)

    def leave(number):
        sys.exit(128 + number)

    with signals_to(leave):
        for name, part in PARTS.items():
            if name in config.what or "all" in config.what:
                rows = Rows(config, name)
                if "all" in config.parts:  # else rows of earlier calls stay
                    files.write_text(rows.file, "")
                files.open_rows(rows.file).close()  # a kill may have cut the last line short
                rows.write("about", "about", **about)
                part(config, rows)
    print(f"written: {config.out_dir}/")


def describe(config: BenchConfig) -> dict:
    machine = platform.processor() or platform.machine()
    if config.device == "cuda":
        machine = torch.cuda.get_device_name()
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{config.device}, {machine}, {config.threads} threads",
        "dtype": config.dtype,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "commit": git_state()["git_commit"],
        "gemm_gflops": round(gemm_rate(config.device, config.dtype) / 1e9),
    }


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
