"""
Times SmolLM2-135M-Instruct here and in transformers: reading 512 tokens, and writing 128 greedily.

    python results/smollm2/speed.py    # adds lines to speed.jsonl; 5 minutes on two cores

"Reads" is the time to the first new token; the logits of all 512 are float32 here, and of the weights' dtype there.
Both sides take turns in one process, on two threads, which keeps freed memory as every script here does. What counts is
the median of the ratios of pairs, and its 95% interval by order statistics.
"""

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
from runs.hardware import seconds_of
from runs.outdir import git_state
from speed.rows import median_interval, rounded

MODEL = "out/smollm2/exported"  # README.md beside this file has both commands
HF = "out/smollm2/hf"
PAIRS = 11
PROMPT = 16
NEW = 128
READ = 512


def main():
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        compare_in(dtype, str(dtype).removeprefix("torch."))


def compare_in(dtype, name):
    ours = load_model(MODEL, torch.device("cpu"))[0].to(dtype).eval()
    theirs = AutoModelForCausalLM.from_pretrained(HF, dtype=dtype).eval()
    torch.manual_seed(0)
    text = torch.randint(2, ours.config.vocab_size, (1, READ))
    lengths = {"do_sample": False, "pad_token_id": 0}

    def write_ours(prompt, n):
        ours.generate(prompt, n, temperature=0)

    def write_theirs(prompt, n):
        theirs.generate(prompt, max_new_tokens=n, min_new_tokens=n, **lengths)

    @torch.inference_mode()
    def logits_ours():
        ours(text)

    @torch.inference_mode()
    def logits_theirs():
        theirs(text, use_cache=False)

    read = f"reads {READ} and writes 1, {name}"
    compare(read, lambda: write_ours(text, 1), lambda: write_theirs(text, 1))
    compare(f"logits of {READ}, {name}", logits_ours, logits_theirs)
    prompt = text[:, :PROMPT]
    compare(
        f"writes {NEW}, {name}", lambda: write_ours(prompt, NEW), lambda: write_theirs(prompt, NEW)
    )


def compare(name, ours, theirs):
    """Adds a line: their seconds over ours, above 1 where ours is faster."""
    ours()
    theirs()
    pairs = []
    for i in range(PAIRS):
        seconds = {}
        for side in (ours, theirs) if i % 2 else (theirs, ours):
            seconds[side] = seconds_of(side, "cpu")
        pairs.append((seconds[theirs], seconds[ours]))
    ratio, low, high = median_interval([a / b for a, b in pairs])
    row = {"name": name, "ratio": rounded(ratio), "low": rounded(low), "high": rounded(high)}
    row["pairs"] = [[rounded(x) for x in pair] for pair in pairs]
    row["commit"] = git_state()["git_commit"]
    row["versions"] = f"torch {torch.__version__}"
    with open(HERE / "speed.jsonl", "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")
    print({key: row[key] for key in ("name", "ratio", "low", "high")}, flush=True)


if __name__ == "__main__":
    main()
