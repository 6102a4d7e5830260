"""
Times SmolLM2-135M-Instruct here and in transformers: reading 512 tokens, and writing 128 greedily.

    python results/smollm2/speed.py    # adds lines to speed.jsonl; 5 minutes on two cores

"Reads" is the time to the first new token; the logits of all 512 are float32 here, and of the weights' dtype there.
Both sides take turns in one process, on two threads, which keeps freed memory as every script here does. What counts is
the median of the ratios of pairs, and its 95% interval by order statistics.
"""

import functools
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from base import configurator

configurator.set_up()  # as every script here does; it makes transformers faster, too

import torch
from transformers import AutoModelForCausalLM

from runs.checkpoint import load_model
from runs.outdir import git_state
from speed.config import BenchConfig
from speed.measure import interleave
from speed.rows import median_interval, rounded

MODEL = "out/smollm2/exported"  # README.md beside this file has both commands
HF = "out/smollm2/hf"
PAIRS = BenchConfig(device="cpu", pairs=11)
PROMPT = 16
NEW = 128
READ = 512


def main():
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        compare_in(dtype, str(dtype).removeprefix("torch."))


def compare_in(dtype, name):
    ours = load_model(MODEL)[0].to(dtype).eval()
    theirs = AutoModelForCausalLM.from_pretrained(HF, dtype=dtype).eval()
    torch.manual_seed(0)
    text = torch.randint(2, ours.config.vocab_size, (1, READ))

    def compare_writing(row, prompt, n):
        write_ours = functools.partial(ours.generate, prompt, n, temperature=0)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        compare(f"{row}, {name}", write_ours, functools.partial(theirs.generate, prompt, **options))

    compare_writing(f"reads {READ} and writes 1", text, 1)
    read_theirs = functools.partial(theirs, text, use_cache=False)
    with torch.inference_mode():
        compare(f"logits of {READ}, {name}", functools.partial(ours, text), read_theirs)
    compare_writing(f"writes {NEW}", text[:, :PROMPT], NEW)


def compare(name, ours, theirs):
    """Adds a line: their seconds over ours, above 1 where ours is faster."""
    seconds = interleave({"ours": ours, "theirs": theirs}, PAIRS)
    pairs = list(zip(seconds["theirs"], seconds["ours"], strict=True))
    ratio, low, high = map(rounded, median_interval([a / b for a, b in pairs]))
    row = {"name": name, "ratio": ratio, "low": low, "high": high}
    print(row, flush=True)
    row["pairs"] = [list(map(rounded, pair)) for pair in pairs]
    row["commit"] = git_state()["git_commit"]
    row["versions"] = f"torch {torch.__version__}"
    with open(HERE / "speed.jsonl", "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
