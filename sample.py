"""Draws text from a checkpoint, and prints each token as it is drawn:

    python sample.py --checkpoint=out/best.pt --start="def main("
    python sample.py --start=FILE:prompt.txt        a prompt from a file (nanoGPT's spelling)
    cat prompt.txt | python sample.py --start=-     from standard input

A new token costs one step: softmax layers keep their keys and values, other mixers their state. For
a checkpoint trained on MQAR the script prints rows of the validation split instead, with the
model's answers beside the right ones.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out

import configurator
from configurator import UserError, key, read_regular

import codecs
import re
import warnings
from dataclasses import dataclass

import torch

from data.shards import Dataset, open_dataset
from data.tokenizer import (
    AlphabetTokenizer,
    ByteTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    tokenizer_of,
    tokenizer_of_checkpoint,
)
from model import GPT
from ops import IGNORE
from ops.sampling import check_finite, most_new_tokens
from runs import memory
from runs.checkpoint import check_vocabulary, load_model
from runs.hardware import pick_device


@dataclass
class SampleConfig:
    elsewhere = {  # keys of nanoGPT that are not keys here, and what to do instead
        "out_dir": "write --checkpoint=OUT_DIR",
        "init_from": "write --checkpoint=FILE or OUT_DIR",
        "dtype": "leave it out, the weights are float32",
        "compile": "leave it out, sampling is never compiled",
    }
    checkpoint: str = key("out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)")
    start: str = key("\n", "the prompt; FILE:path reads it from a file, - from standard input")
    num_samples: int = key(3, "number of samples; MQAR: of rows", at_least=1)
    max_new_tokens: int | None = key(
        None, "new tokens per sample (None: 500, or as many as the model can add)", at_least=1
    )
    temperature: float = key(0.8, "0: always the likeliest token; 1: the model's own distribution", at_least=0)
    top_k: int | None = key(None, "draw from the k likeliest tokens only", at_least=1)
    top_p: float | None = key(
        None, "draw from the fewest tokens that together reach this probability", above=0, at_most=1
    )
    seed: int = key(1337, "seed of the draws", at_least=0)
    dataset: str | None = key(None, "synthetic data: their folder (None: the data that the checkpoint was trained on)")
    device: str = key("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    memory_check: bool = key(True, "refuse to run if more memory is needed than is left")


def main(argv: list[str]) -> None:
    config = configurator.load(SampleConfig, argv, program="sample.py", description=__doc__)
    model, checkpoint = load_model(config.checkpoint, pick_device(config.device))
    trained_on = checkpoint.get("data", {})
    torch.manual_seed(config.seed)
    if trained_on.get("tokenizer") == "mqar":
        dataset = open_dataset(config.dataset or trained_on.get("path", ""))
        is_mqar = dataset.tokenizer == "mqar" and all(re.fullmatch(r"\d{1,9}/\d{1,9}", name) for name in dataset.slices)
        if not is_mqar or dataset.kind != "examples" or dataset.vocab_size > model.config.vocab_size:
            raise UserError(f"{dataset.folder}: is no MQAR data set of at most {model.config.vocab_size} token ids")
        rows = min(config.num_samples, dataset.counts("val")["rows"])
        memory.check_pass(config, model, rows, memory.longest_row(dataset, "val", model.config.block_size))
        show_answers(model, dataset, rows)
    elif trained_on.get("tokenizer") == "backcopy":
        dataset = open_dataset(config.dataset or trained_on.get("path", ""))
        check_vocabulary(model.config.vocab_size, checkpoint, dataset)
        write_samples(model, tokenizer_of(dataset), dataset.first_ids, config)
    else:
        tokenizer = tokenizer_of_checkpoint(config.checkpoint, trained_on)
        write_samples(model, tokenizer, trained_on.get("first_ids", []), config)


MOST_BYTES = 1 << 24  # the longest prompt


def read_prompt(start: str) -> str:
    """The text of the prompt. Raises UserError if it cannot be read, is too long, or is not UTF-8."""
    try:
        if start == "-":
            text = sys.stdin.buffer.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise UserError(f"start='-': standard input gives more than {MOST_BYTES:,} bytes")
            return text.decode()
        if start.startswith("FILE:"):
            return read_regular(start[len("FILE:") :], MOST_BYTES).decode()
        start.encode()  # a command line may hold bytes that are not text
        return start
    except UnicodeError:
        raise UserError(f"start={start!r}: is not UTF-8 text") from None


def write_samples(
    model: GPT,
    tokenizer: AlphabetTokenizer | ByteTokenizer | GPT2Tokenizer | FileTokenizer,
    first_ids: list[int],
    config: SampleConfig,
) -> None:
    """Prints the prompt with its continuation, num_samples times. The model reads first_ids before the prompt."""
    prompt = read_prompt(config.start)
    idx = torch.tensor([[*first_ids, *tokenizer.encode(prompt)]], dtype=torch.long, device=model.wte.weight.device)
    memory.check_pass(config, model, 1, idx.shape[1])
    options: dict = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    # if not even one fits, stream raises with the reason
    n_new = config.max_new_tokens or int(max(1, min(500, most_new_tokens(model, idx.shape[1]))))
    if config.max_new_tokens is None and n_new < 500:
        note = f"note: {n_new} new tokens, not 500: the model ends at block_size={model.config.block_size}"
        print(note, file=sys.stderr)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
        for _ in range(config.num_samples):
            tokens = model.stream(idx, n_new, n_tokens=tokenizer.vocab_size, **options)
            sys.stdout.write(prompt)  # after stream has checked the request
            # a character may take several tokens: hold its bytes back until it is whole
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            for new in tokens:
                sys.stdout.write(decoder.decode(tokenizer.decode_bytes(new[0].tolist())))
                sys.stdout.flush()
            print(decoder.decode(b"", final=True) + "\n" + "-" * 80)


@torch.no_grad()
def show_answers(model: GPT, dataset: Dataset, num_samples: int) -> None:
    """Prints rows of the validation split: the pairs in context, then every query with the model's answer."""
    block_size, right, asked = model.config.block_size, 0, 0
    for inputs, targets, name in dataset.eval_batches("val", num_samples, block_size):
        logits = model(inputs.to(model.wte.weight.device))
        check_finite(logits)
        answers = logits.argmax(-1).cpu()
        for row, labels, given in zip(inputs, targets, answers, strict=True):
            end = 2 * int(name.partition("/")[2])
            pairs = zip(row[0:end:2].tolist(), row[1:end:2].tolist(), strict=False)
            print(f"{name}  " + "  ".join(f"{k}:{v}" for k, v in pairs))
            for position in (labels != IGNORE).nonzero().flatten().tolist():
                answer, label = int(given[position]), int(labels[position])
                right, asked = right + (answer == label), asked + 1
                verdict = "right" if answer == label else f"wrong, it is {label}"
                print(f"    at {position:>4}: {int(row[position])} -> {answer}  {verdict}")
        break
    print(f"{right} of {asked} right (evaluate.py gives the accuracy over the whole split)")


if __name__ == "__main__":
    configurator.run(main)
