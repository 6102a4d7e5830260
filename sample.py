"""Draws text from a checkpoint, and prints each token as it is drawn:

    python sample.py --checkpoint=out/best.pt --start="def main("
    python sample.py out/gla --start=FILE:prompt.txt        a prompt from a file (nanoGPT's spelling)
    python sample.py nanoGPT/out/ckpt.pt --tokenizer=char:input.txt

A new token costs one step: softmax layers keep their keys and values, other mixers their state.
Control characters that the model draws are printed as they are.
"""

from dataclasses import dataclass

from base import configurator
from base.configurator import key
from base.files import find_checkpoint


@dataclass
class SampleConfig:
    checkpoint: str = key(
        "out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)", find=find_checkpoint
    )
    start: str = key("\n", "the prompt; FILE:path reads it from a file; empty: none", at_least=0)
    tokenizer: str | None = key(
        None, "gpt2, byte, a folder, or char:FILE, a text's characters (None: the checkpoint's)"
    )
    num_samples: int = key(3, "number of samples", at_least=1)
    max_new_tokens: int | None = key(
        None, "new tokens a sample (None: 500, or as many as it can add)", at_least=1
    )
    temperature: float = key(
        0.8, "0: always the likeliest token; 1: the model's own distribution", at_least=0
    )
    top_k: int | None = key(None, "draw from the k likeliest tokens only", at_least=1)
    top_p: float | None = key(
        None, "draw from the fewest tokens that reach this probability", above=0, at_most=1
    )
    seed: int = key(1337, "seed of the draws", at_least=0)
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))


configurator.begin(__name__, SampleConfig)

import codecs
import sys

import torch

from base.files import one_line, read_regular
from data.tokenizer import tokenizer_of_checkpoint
from ops.sampling import most_new_tokens
from runs.checkpoint import load_model
from runs.hardware import pick_device


def main(argv: list[str]) -> None:
    config = configurator.load(SampleConfig, argv)
    model, checkpoint = load_model(config.checkpoint, pick_device(config.device))
    trained_on = checkpoint.get("data", {})
    tokenizer = tokenizer_of_checkpoint(config.checkpoint, trained_on, config.tokenizer)
    prompt = config.start
    with one_line("start: is not UTF-8 text", UnicodeError):
        if prompt.startswith("FILE:"):
            prompt = read_regular(prompt.removeprefix("FILE:"), 1 << 24).decode()
        ids = tokenizer.encode(prompt)
    # first what each row of its training began with, as <s>; an empty prompt without that is the end
    # of the text before
    ids = [*trained_on.get("first_ids", []), *ids] or [tokenizer.end_of_text]
    idx = torch.tensor([ids], dtype=torch.long, device=model.wte.weight.device)
    most = most_new_tokens(model, idx.shape[1])
    # if not even one fits, stream raises with the reason
    n_new = config.max_new_tokens or int(max(1, min(500, most)))
    torch.manual_seed(config.seed)
    for _ in range(config.num_samples):
        tokens = model.stream(
            idx,
            n_new,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            n_tokens=tokenizer.vocab_size,
        )
        sys.stdout.write(prompt)  # after stream has checked the request
        # a character may take several tokens: hold its bytes back until it is whole
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for new in tokens:
            sys.stdout.write(decoder.decode(tokenizer.decode_bytes(new[0].tolist())))
            sys.stdout.flush()
        print(decoder.decode(b"", final=True) + "\n" + "-" * 80)


if __name__ == "__main__":
    configurator.run(main)
