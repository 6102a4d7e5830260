"""Draws text from a checkpoint, and prints each token as it is drawn:

    python sample.py --checkpoint=out/best.pt --start="def main("
    python sample.py --start=FILE:prompt.txt        a prompt from a file (nanoGPT's spelling)
    torchrun --standalone --nproc_per_node=8 -- sample.py --start=a    from a model that 8 GPUs share, a shard on each

A new token costs one step: softmax layers keep their keys and values, other mixers their state.
Control characters that the model draws are printed escaped, as \\x1b, so that a terminal does not
obey them.
"""

from dataclasses import dataclass

import configurator
from base.files import find_checkpoint, find_path
from configurator import key


def find_prompt(start: str) -> None:
    if start.startswith("FILE:"):
        find_path(start[5:])


@dataclass
class SampleConfig:
    checkpoint: str = key(
        "out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)", find=find_checkpoint
    )
    start: str = key(
        "\n", "the prompt; FILE:path reads it from a file", find=find_prompt, at_least=0
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


configurator.begin(__name__, SampleConfig, __doc__)

import codecs
import contextlib
import io
import sys
import warnings

import torch

from configurator import UserError, read_regular
from data.tokenizer import tokenizer_of_checkpoint
from ops.sampling import most_new_tokens
from runs import parallel
from runs.checkpoint import check_same_weights, load_model
from runs.hardware import Processes


def main(argv: list[str]) -> None:
    config = configurator.load(SampleConfig, argv)
    with Processes(config.device, 0) as processes:
        # all draw the same tokens, since each block is gathered for all, and one prints them
        with contextlib.redirect_stdout(sys.stdout if processes.is_main else io.StringIO()):
            run(config, processes)


def run(config: SampleConfig, processes: Processes) -> None:
    is_alone = processes.world_size == 1
    model, checkpoint = load_model(config.checkpoint, processes.device if is_alone else "cpu")
    if not is_alone:
        check_same_weights(processes, config.checkpoint)
        parallel.shard(model, processes, "float32")
    trained_on = checkpoint.get("data", {})
    tokenizer, prompt = (
        tokenizer_of_checkpoint(config.checkpoint, trained_on),
        read_prompt(config.start),
    )
    # what each row of its training began with, as <s>, stands before the prompt
    ids = [*trained_on.get("first_ids", []), *tokenizer.encode(prompt)]
    idx = torch.tensor([ids], dtype=torch.long, device=model.wte.weight.device)
    # if not even one fits, stream raises with the reason
    n_new = config.max_new_tokens or int(max(1, min(500, most_new_tokens(model, idx.shape[1]))))
    options: dict = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    torch.manual_seed(config.seed)
    with warnings.catch_warnings(), parallel.eager(model):
        warnings.showwarning = lambda message, *_: (
            processes.is_main and print(f"note: {message}", file=sys.stderr)
        )
        for _ in range(config.num_samples):
            tokens = model.stream(idx, n_new, n_tokens=tokenizer.vocab_size, **options)
            sys.stdout.write(prompt)  # after stream has checked the request
            # a character may take several tokens: hold its bytes back until it is whole
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            for new in tokens:
                sys.stdout.write(decoder.decode(tokenizer.decode_bytes(new[0].tolist())))
                sys.stdout.flush()
            print(decoder.decode(b"", final=True) + "\n" + "-" * 80)


def read_prompt(start: str) -> str:
    """The text of the prompt. Raises UserError if it cannot be read, is over 16 MB, or is not
    UTF-8."""
    try:
        if start.startswith("FILE:"):
            return read_regular(start[len("FILE:") :], 1 << 24).decode()
        start.encode()  # a command line may hold bytes that are not text
        return start
    except UnicodeError:
        raise UserError(f"start={start!r}: is not UTF-8 text") from None


if __name__ == "__main__":
    configurator.run(main)
