"""The keys of bench.py. No torch is imported here."""

from dataclasses import dataclass

from base.configurator import key
from keys import DTYPES


@dataclass
class BenchConfig:
    what: list[str] = key(
        ["all"], "train, overhead, length, packing, decode, ops, gaterun, gpu, or all"
    )
    against: str | None = key(None, "nanoGPT's model.py, to be measured beside ours")
    pairs: int = key(16, "pairs of a ratio, and timed steps of a row of the part gpu", at_least=6)
    seeds: list[int] = key(
        [0, 1, 2, 3, 4, 5, 6, 7], "seeds of the part gaterun; each takes two minutes of nanoGPT"
    )
    recipes: list[str] = key(
        ["record"], "recipes of the part gaterun (speed/gaterun.py); all: those of its first track"
    )
    parts: list[str] = key(
        ["all"], "parts of the part gpu (speed/gpu.py), or all; with some, earlier rows stay"
    )
    seconds: int = key(1_800, "seconds of the part gpu: what has none left is skipped", at_least=1)
    rehearse: bool = key(False, "true: tiny models on the CPU: does every part but gaterun work?")
    threads: int = key(0, "CPU threads (0: as many as cores)", at_least=0, at_most=512)
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = key("auto", "dtype of matrix products", choices=("auto", *DTYPES))
    out_dir: str = key("out/bench", "where the files go")
    overwrite: bool = key(
        False, "true: take an out_dir that holds files which are none of a benchmark"
    )
