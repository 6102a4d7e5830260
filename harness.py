"""EleutherAI's lm-evaluation-harness on a checkpoint: its commands, with one more model, nanogate.

    pip install lm-eval
    python harness.py run --model nanogate --model_args checkpoint=out/best.pt --tasks NAME --include_path FOLDER

The words are those of `lm-eval` (see its documentation); FOLDER may hold task files of your own. Without --device it
is a GPU where there is one, and else the CPU. model_args are the checkpoint and the dtype of matrix products (the
run's if it isn't given). A context that several continuations share is read once, and so is a long text where every
layer is recurrent. Elsewhere the last block_size tokens are read, as the harness does it for other models; an answer
ends early where cosformer or learned positions end. Special tokens are those of an imported model's
generation_config.json; without it GPT-2's end of text, or for other tokenizers a line end before a text. What each row
of the training began with is read before every text.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out

import configurator
from configurator import UserError

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from data.tokenizer import END_OF_TEXT, tokenizer_of_checkpoint
from evaluate import CHUNK_TOKENS
from model import GPT
from ops.sampling import check_finite, most_new_tokens
from rules import wrong_field
from runs.checkpoint import file_of, load_model
from runs.files import check_output, read_json
from runs.hardware import DTYPES, autocast, pick_device, pick_dtype

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    raise SystemExit("error: lm-eval is not installed: pip install lm-eval") from None


@register_model("nanogate")
class NanogateLM(TemplateLM):
    """A checkpoint as the harness sees a model: strings in, log-likelihoods and strings out."""

    def __init__(
        self, checkpoint="out/best.pt", dtype: str | None = None, device=None, batch_size=None, max_batch_size=None
    ):
        super().__init__()
        device = pick_device(device or "auto")
        self.model, loaded = load_model(checkpoint, device)
        dtype = dtype or loaded.get("dtype", "float32")
        configurator.check_choice("dtype", dtype, tuple(DTYPES))
        self.dtype = pick_dtype(dtype, device)
        self.coder = tokenizer_of_checkpoint(checkpoint, loaded.get("data", {}))
        self.first, self.ends = special_tokens(file_of(checkpoint).parent)
        self.ends = [END_OF_TEXT] if self.coder.name == "gpt2" else self.ends
        self.first_ids = loaded.get("data", {}).get("first_ids", [])  # each row of its training began with them
        # continuations of one context that are read at once
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 16
        # the most ids behind first_ids that are read at once; None: any number
        is_recurrent = all(block.mixer.past_block_size == "goes on" for block in self.model.blocks)
        self.limit = max(1, self.model.config.block_size - len(self.first_ids))
        if is_recurrent and self.model.wpe is None:
            self.limit = None

    @property
    def eot_token_id(self) -> int:
        return self.ends[0] if self.ends else self.coder.encode("\n")[0]

    @property
    def prefix_token_id(self) -> int:
        if self.first_ids:
            return self.first_ids[-1]
        return self.eot_token_id if self.first is None else self.first

    def begun(self, ids: list[int]) -> list[int]:
        """The ids behind first_ids, as a row of the training; those of no text are prefix_token_id alone."""
        n = len(self.first_ids)
        return [*self.first_ids, *(ids[n:] if ids[:n] == self.first_ids else ids)] or [self.prefix_token_id]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **keys: object) -> list[int]:
        return self.coder.encode(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **keys) -> list[tuple[float, bool]]:
        """[(texts, context ids, continuation ids)] -> [(log-likelihood of the continuation, whether it is likeliest)].

        Raises UserError for a continuation that is longer than the model's context.
        """
        groups, scores = {}, {}
        for i, (_, context, continuation) in enumerate(requests):
            if self.limit is not None:
                if len(continuation) > self.limit:
                    words = f"a continuation of {len(continuation)} tokens is longer than block_size={self.limit}"
                    raise UserError(words)
                context = context[max(0, len(context) + len(continuation) - self.limit - 1) :]
            groups.setdefault(tuple(self.begun(context)), []).append((i, continuation))
        for context, members in groups.items():
            places, continuations = zip(*members, strict=True)
            read = log_likelihoods(self.model, list(context), continuations, self.batch_size, self.dtype)
            for i, score in zip(places, read, strict=True):
                scores[i] = score
                self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        return [scores[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text: of every token once, after as many as there are in the window."""
        totals = []
        for request in requests:
            ids, total = [self.prefix_token_id, *self.tok_encode(request.args[0])], 0.0
            for context, predicted in windows(ids, self.limit or len(ids)):
                ((nats, _),) = log_likelihoods(self.model, self.begun(context), [predicted], 1, self.dtype)
                total += nats
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the request's stop strings."""
        texts = []
        for request in requests:
            texts.append(self.write(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def write(self, context: str, keys: dict) -> str:
        until = keys.get("until") or []
        until = [until] if isinstance(until, str) else until
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        length = next((int(keys[name]) for name in names if keys.get(name) is not None), 256)
        samples, temperature = keys.get("do_sample"), keys.get("temperature")
        if samples is False or temperature is None:
            temperature = 1.0 if samples else 0.0
        ids = self.tok_encode(context)
        ids = self.begun(ids if self.limit is None else ids[-self.limit :])
        if self.limit is not None:
            length = int(min(length, most_new_tokens(self.model, len(ids))))
        idx, new, text = torch.tensor([ids], device=self.model.wte.weight.device), [], ""
        options = dict(top_k=keys.get("top_k"), top_p=keys.get("top_p"), n_tokens=self.coder.vocab_size)
        with autocast(idx.device.type, self.dtype):
            for token in self.model.stream(idx, length, temperature=float(temperature), **options):
                if int(token) in self.ends:
                    break
                new.append(int(token))
                text = self.coder.decode_bytes(new).decode(errors="replace")
                if ends := [text.index(stop) for stop in until if stop and stop in text]:
                    return text[: min(ends)]
        return text


def special_tokens(folder: Path) -> tuple[int | None, list[int]]:
    """(the id before a text or None, those that end one) of an imported model's folder. Raises UserError."""
    file, a_token = folder / "generation_config.json", (int, 0, 1 << 32, None)
    values = read_json(file) if file.is_file() else {}
    ends = values.get("eos_token_id") if isinstance(values, dict) else None
    rule = {"bos_token_id?": a_token, "eos_token_id?": [a_token, 0, 99] if isinstance(ends, list) else a_token}
    if wrong := wrong_field(values, rule):
        raise UserError(f"{file}: {wrong}")
    return values.get("bos_token_id"), [] if ends is None else ends if isinstance(ends, list) else [ends]


def windows(ids: list[int], limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (context, the ids to predict after it), at most `limit` inputs each: every id but the first once."""
    for done in range(0, len(ids) - 1, limit):
        end = min(done + limit, len(ids) - 1)
        yield ids[max(0, end - limit) : done + 1], ids[done + 1 : end + 1]


@torch.no_grad()
def log_likelihoods(
    model: GPT, context: list[int], continuations: Sequence[list[int]], batch_size: int = 16, dtype: str = "float32"
) -> list[tuple[float, bool]]:
    """[(log-likelihood of the continuation, whether each of its tokens is the likeliest)]; the context is read once."""
    device, scores, start = model.wte.weight.device, [], 0
    with autocast(device.type, dtype):
        state = model.init_state(1, dtype=model.wte.weight.dtype)
        for piece in torch.tensor([context], device=device).split(CHUNK_TOKENS, dim=1):
            hidden, state = model.features(piece, state, start)
            start += piece.shape[1]
        for i in range(0, len(continuations), batch_size):
            scores += read_on(model, hidden[:, -1:], state, start, continuations[i : i + batch_size])
    return scores


def read_on(
    model: GPT, last: torch.Tensor, state: list[dict], start: int, continuations: Sequence[list[int]]
) -> list[tuple[float, bool]]:
    """log_likelihoods of B continuations side by side, after `start` ids whose last hidden state is (1, 1, C)."""
    B, done = len(continuations), 0
    state = [{name: tensor.repeat_interleave(B, dim=0) for name, tensor in layer.items()} for layer in state]  # copies
    idx = pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in continuations], batch_first=True).to(last.device)
    nats, greedy, hidden = [0.0] * B, [True] * B, last.expand(B, -1, -1)
    while done < idx.shape[1]:
        for i, ids in enumerate(continuations):
            if len(targets := idx[i, done : min(done + hidden.shape[1], len(ids))]):
                logits = model.logits(hidden[i, : len(targets)])
                check_finite(logits)
                nats[i] += float(logits.log_softmax(-1).gather(1, targets[:, None]).double().sum())
                greedy[i] = greedy[i] and bool((logits.argmax(-1) == targets).all())
        done += hidden.shape[1]
        if done < idx.shape[1]:
            hidden, state = model.features(idx[:, done - 1 : -1][:, :CHUNK_TOKENS], state, start + done - 1)
    return list(zip(nats, greedy, strict=True))


def check_output_path(argv: list[str]) -> None:
    """Makes the folder of --output_path, or raises OSError or UserError: the harness would only log that it cannot."""
    words = argparse.ArgumentParser("harness.py", add_help=False, allow_abbrev=False)
    words.add_argument("--output_path", "-o")
    if path := words.parse_known_args(argv)[0].output_path:
        file = Path(path) if path.endswith(".json") else Path(path, "results.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        check_output("output_path", file)


def main(argv: list[str]) -> None:
    check_output_path(argv)
    has_file = any(word.startswith(("-C", "--config")) for word in argv)  # which may name the device
    if len(argv) > 1 and argv[0] not in ("ls", "validate") and not has_file:
        # lm-eval's own default is cuda:0; of two the last one counts
        argv = ["run", "--device=auto", *argv[argv[0] == "run" :]]
    sys.argv = [str(Path(__file__).name), *argv]
    cli_evaluate()


if __name__ == "__main__":
    configurator.run(main)
