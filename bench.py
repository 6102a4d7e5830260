"""Measures speed and memory; prints tables and, as its last line, one JSON object.

    python bench.py gpu                            whether a GPU computes the same, how fast, and a page for an issue
    python bench.py all --against=PATH/model.py    every part; the file is nanoGPT's own, which is not kept here

Absolute times of a shared machine mean little: here two sides run in turn in one process, with the
same number of threads, and their order changes from pair to pair. What is reported is the median of
the paired ratios, and its 95% interval by order statistics (no assumption about the noise). A ratio
is a claim where its other side is what a user could take instead, or where a limit is known. A
claim is *met* if the whole interval clears its target, *missed* if the whole interval falls short
of it, else *unresolved*. out_dir gets a JSON file per part, with the raw pairs.
"""

import configurator
from speed.config import BenchConfig

configurator.begin(__name__, BenchConfig, __doc__, positional="what")

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from base import files
from configurator import UserError, check_choice
from ops.kernels import has_fla
from runs.hardware import cpu_threads, gemm_rate, pick_device, pick_dtype, signals_to
from runs.outdir import git_state, write_text
from speed.costs import bench_decode, bench_length, bench_overhead, bench_train
from speed.forms import bench_ops
from speed.gaterun import RECIPES, bench_gaterun
from speed.gpu import LOG, bench_gpu
from speed.gpu import PARTS as PARTS_OF_GPU
from speed.measure import Report
from speed.rows import NAME, page

PARTS = dict(
    train=bench_train,
    overhead=bench_overhead,
    length=bench_length,
    decode=bench_decode,
    ops=bench_ops,
    gaterun=bench_gaterun,
    gpu=bench_gpu,
)


def main(argv: list[str]) -> None:
    config = configurator.load(BenchConfig, argv, positional="what")
    for key, known in {"what": [*PARTS], "recipes": [*RECIPES], "parts": [*PARTS_OF_GPU]}.items():
        for name in getattr(config, key):
            check_choice(key, name, (*known, "all"))
    if not config.seeds or (config.against and not Path(config.against).is_file()):
        raise UserError(
            "seeds: name one at least"
            if not config.seeds
            else f"against={config.against}: is no file"
        )
    config.threads = cpu_threads(config.threads)
    torch.set_num_threads(config.threads)
    config.device = "cpu" if config.rehearse else pick_device(config.device)
    config.dtype = pick_dtype(config.dtype, config.device)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")  # for all sides, as train.py and nanoGPT's do
    if config.against is None and "gaterun" in config.what:
        raise UserError(
            "against=None: the part gaterun runs nanoGPT, too; name its model.py with --against=PATH"
        )
    parts = [
        name
        for name in PARTS
        if {name, "all"} & {*config.what} and (config.against or name != "gaterun")
    ]
    out_dir = Path(config.out_dir)
    files.claim(out_dir, "bench", config.overwrite)
    files.check_inside(out_dir, ["gpu.md", NAME, LOG, *(f"{name}.json" for name in parts)])
    about = describe(config)
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    measured = {"claims": [], "ratios": []}
    for name in parts:
        report = Report(name)
        try:
            with signals_to(lambda number: sys.exit(128 + number)):
                PARTS[name](config, report)
        except BaseException:
            about["stopped"] = True  # what it has measured by then is kept
            raise
        finally:
            if report.rows or report.ratios or report.claims:
                write_text(
                    out_dir / f"{name}.json", json.dumps(about | asdict(report), indent=1) + "\n"
                )
                if name == "gpu":
                    write_text(out_dir / "gpu.md", page(about, report.rows))
            print(report)
        for kind, of_all in measured.items():
            of_all += [
                {k: v for k, v in ratio.items() if k != "pairs"} for ratio in getattr(report, kind)
            ]
    print(f"written: {out_dir}/")
    print(json.dumps(about | measured))


def describe(config: BenchConfig) -> dict:
    # these kernels compute the recurrence of a model (Mixer.read); the part ops measures the forms
    # in PyTorch
    kernels = "fla" if config.device == "cuda" and has_fla() else "plain PyTorch"
    machine = (
        torch.cuda.get_device_name()
        if config.device == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{config.device}, {machine}, {config.threads} threads",
        "dtype": config.dtype,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "commit": git_state()["git_commit"],
        "kernels": kernels,
        "gemm_gflops": {
            name: round(gemm_rate(config.device, name) / 1e9) for name in ("float32", "bfloat16")
        },
    }


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
