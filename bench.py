"""Measures speed and memory; prints what it finds and, as its last line, one JSON object.

    python bench.py gpu                            whether a GPU computes the same, how fast, and a page for an issue
    python bench.py all --against=PATH/model.py    every part; the file is nanoGPT's own, which is not kept here

Absolute times of a shared machine mean little: here two sides run in turn in one process, with the
same number of threads, and their order changes from pair to pair. What is reported is the median of
the paired ratios, and its 95% interval by order statistics (no assumption about the noise). A ratio
is a claim where its other side is what a user could take instead, or where a limit is known. A
claim is *met* if the whole interval clears its target, *missed* if the whole interval falls short
of it, else *unresolved*. out_dir gets a JSON file per part, with the raw pairs.
"""

from base import configurator
from speed.config import BenchConfig

configurator.begin(__name__, BenchConfig, __doc__, positional="what")

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from base import files
from base.configurator import UserError, check_choice
from ops.kernels import has_fla
from runs.hardware import cpu_threads, gemm_rate, pick_device, pick_dtype, signals_to
from runs.outdir import git_state
from speed.costs import bench_decode, bench_length, bench_overhead, bench_train
from speed.forms import bench_ops
from speed.gaterun import RECIPES, bench_gaterun
from speed.gpu import PARTS as PARTS_OF_GPU
from speed.gpu import bench_gpu
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
BESIDE_NANOGPT = ("train", "gaterun")


def main(argv: list[str]) -> None:
    config = configurator.load(BenchConfig, argv, positional="what")
    for key, known in (("what", PARTS), ("recipes", RECIPES), ("parts", PARTS_OF_GPU)):
        for name in getattr(config, key):
            check_choice(key, name, (*known, "all"))
    if not config.seeds:
        raise UserError("seeds: name one at least")
    if config.against and not Path(config.against).is_file():
        raise UserError(f"against={config.against}: is no file")
    names = [name for name in PARTS if name in config.what or "all" in config.what]
    for name in BESIDE_NANOGPT:
        if config.against is None and name in config.what:
            raise UserError(
                f"against=None: the part {name} runs nanoGPT, too; name its model.py with --against=PATH"
            )
    if config.against is None:
        names = [name for name in names if name not in BESIDE_NANOGPT]
    config.threads = cpu_threads(config.threads)
    torch.set_num_threads(config.threads)
    config.device = "cpu" if config.rehearse else pick_device(config.device)
    config.dtype = pick_dtype(config.dtype, config.device)
    if config.device == "cuda":
        torch.set_float32_matmul_precision("high")  # for all sides, as train.py and nanoGPT's do
    out_dir = Path(config.out_dir)
    files.claim(out_dir, "bench", config.overwrite)
    files.check_inside(out_dir, ["gpu.md", NAME, *(f"{name}.json" for name in names)])
    about = describe(config)
    for name, value in about.items():
        print(f"{name}: {value}")
    found: dict[str, list] = {"claims": [], "ratios": []}
    for name in names:
        report = Report(name)
        try:
            with signals_to(lambda number: sys.exit(128 + number)):
                PARTS[name](config, report)
        except BaseException:
            about["stopped"] = True  # what it has measured by then is kept
            raise
        finally:
            if report.rows or report.ratios or report.claims:
                text = json.dumps(about | asdict(report), indent=1)
                files.write_text(out_dir / f"{name}.json", f"{text}\n")
            if name == "gpu":
                files.write_text(out_dir / "gpu.md", page(about, report.rows))
        for kind in found:
            for ratio in getattr(report, kind):
                found[kind].append({key: ratio[key] for key in ratio if key != "pairs"})
    print(f"written: {out_dir}/")
    print(json.dumps(about | found))


def describe(config: BenchConfig) -> dict:
    machine = platform.processor() or platform.machine()
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    if config.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        machine = f"{card.name}, {card.total_memory / 1e9:.0f} GB"
        versions += f", CUDA {torch.version.cuda}"
    rates = {}
    for dtype in ("float32", "bfloat16"):
        rates[dtype] = round(gemm_rate(config.device, dtype) / 1e9)
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{config.device}, {machine}, {config.threads} threads",
        "dtype": config.dtype,
        "versions": versions,
        "commit": git_state()["git_commit"],
        # these compute the recurrence of a model; the part ops measures the forms in PyTorch
        "kernels": "fla" if config.device == "cuda" and has_fla() else "plain PyTorch",
        "gemm_gflops": rates,
    }


if __name__ == "__main__":
    configurator.run(main, needs_stdout=False)
