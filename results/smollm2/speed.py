"""
Times SmolLM2-135M-Instruct here and in transformers: reading 512 tokens, and writing 128 greedily.

    python results/smollm2/speed.py    # adds lines to speed.jsonl; 7 minutes on two cores

Needs `hub/export.py --checkpoint=out/smollm2/model.gguf --to_hf=out/smollm2/hf --family=llama` and transformers. Both sides take turns in one
process, on two threads; what counts is the median of the ratios of pairs, and its 95% interval by order statistics.
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from transformers import AutoModelForCausalLM

from runs.checkpoint import load_model
from runs.hardware import seconds_of
from runs.outdir import git_state
from speed.rows import median_interval, rounded

MODEL = "out/smollm2/hf"
PAIRS = 11
PROMPT = 16
NEW = 128
READ = 512


def main():
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        ours = load_model(MODEL, torch.device("cpu"))[0].to(dtype).eval()
        theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
        torch.manual_seed(0)
        text = torch.randint(2, ours.config.vocab_size, (1, READ))
        prompt = text[:, :PROMPT]

        @torch.inference_mode()
        def read_ours():
            ours(text)

        @torch.inference_mode()
        def read_theirs():
            theirs(text, use_cache=False)

        def write_ours():
            ours.generate(prompt, NEW, temperature=0)

        def write_theirs():
            lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
            theirs.generate(prompt, do_sample=False, pad_token_id=0, **lengths)

        compare(f"reads {READ} {str(dtype)[6:]}", read_ours, read_theirs)
        compare(f"writes {NEW} {str(dtype)[6:]}", write_ours, write_theirs)


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
