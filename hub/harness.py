"""EleutherAI's lm-evaluation-harness on a checkpoint: its commands, with one more model, nanogate.

    pip install lm-eval
    python hub/harness.py run --model nanogate --model_args checkpoint=out/best.pt \\
        --tasks NAME --include_path FOLDER

The words are those of `lm-eval` (see its documentation); FOLDER may hold task files of your own.
Without --device it is a GPU where there is one, and else the CPU. model_args are the checkpoint and
the dtype of matrix products (the run's if it isn't given). Texts are read one by one, of a longer
one the last block_size tokens, as the harness does it for other models; an answer ends early where
cosformer or learned positions end. An answer also ends at the eos_token_id of an imported model's
generation_config.json, and at GPT-2's end of text. An empty context begins with that id; where there
is none, with a line end. What an imported model's tokenizer.json puts before a text, as Llama's
does, stands before every text, and is not counted as a part of it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator

if __name__ == "__main__":
    configurator.set_up()

import torch
from tqdm import tqdm

from base.configurator import UserError
from base.files import find_checkpoint, one_line, read_json
from data.tokenizer import END_OF_TEXT, tokenizer_of_checkpoint
from model import token_losses
from ops.sampling import check_finite, most_new_tokens
from runs.checkpoint import load_model
from runs.hardware import DTYPES, Processes, autocast, pick_dtype

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise SystemExit("error: lm-eval is not installed: pip install lm-eval") from None


@register_model("nanogate")
class NanogateLM(TemplateLM):
    """A checkpoint as the harness sees a model: strings in, log-likelihoods and strings out."""

    def __init__(self, checkpoint="out/best.pt", dtype=None, device=None, **ignored):
        super().__init__()
        if device in (None, "cuda:0"):  # the latter is lm-eval's own default
            device = "auto"
        processes = Processes(device, 0)
        self._device = torch.device(processes.device)
        self.model, loaded = load_model(checkpoint, processes.device)
        dtype = dtype or loaded.get("dtype", "float32")
        configurator.check_choice("dtype", dtype, tuple(DTYPES))
        self.dtype = pick_dtype(dtype, processes.device_type)
        data = loaded.get("data", {})
        self.coder = tokenizer_of_checkpoint(checkpoint, data)
        self.ends = ids_that_end(find_checkpoint(checkpoint).with_name("generation_config.json"))
        if self.coder.name == "gpt2":
            self.ends = [END_OF_TEXT]
        # the ids before every text, which a data set or the tokenizer.json of an imported model has
        self.first_ids = data.get("first_ids", [])
        self.limit = self.model.config.block_size

    @property
    def eot_token_id(self) -> int:
        return self.ends[0] if self.ends else self.coder.encode("\n")[0]

    @property
    def prefix_token_id(self) -> int:
        return self.first_ids[-1] if self.first_ids else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **keys: object
    ) -> list[int]:
        """The ids of a text, behind first_ids unless add_special_tokens is false."""
        first_ids = [] if add_special_tokens is False else self.first_ids
        return [*first_ids, *self.coder.encode(string)]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **keys
    ) -> list[tuple[float, bool]]:
        """[(texts, context ids, continuation ids)] -> [(log-likelihood of the continuation, whether
        it is likeliest)]. Raises UserError for a continuation without tokens, or one that is longer
        than the model's context."""
        found = []
        for (_, text), context, continuation in tqdm(requests, disable=disable_tqdm):
            n = len(continuation)
            if not 1 <= n <= self.limit:
                raise UserError(
                    f"a continuation of {n} tokens cannot be scored "
                    f"(1 to block_size={self.limit}): {text[:99]!r}"
                )
            ids = [*context, *continuation[:-1]][-self.limit :]
            targets = torch.tensor(continuation, device=self._device)
            with autocast(self._device.type, self.dtype):
                hidden, _ = self.model.features(torch.tensor([ids], device=self._device))
                logits = self.model.logits(hidden[0, -n:])  # (n, V)
            check_finite(logits)
            nats = token_losses(logits, targets).cpu().double().sum()  # MPS has no float64
            is_likeliest = bool((logits.argmax(-1) == targets).all())
            found.append((-nats.item(), is_likeliest))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text: of every token once, after as many as there are in
        the window. The id before a text is no part of it, and is not counted."""
        totals = []
        for request in requests:
            (text,) = request.args
            ids = self.coder.encode(text)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.limit, 1)
            pairs = [(("", text), *make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            totals.append(sum(nats for nats, _ in scores))
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the request's stop
        strings."""
        return [self.write(*request.args) for request in requests]

    def write(self, context: str, keys: dict) -> str:
        keys = normalize_gen_kwargs(keys)
        ids = self.tok_encode(context)[-self.limit :] or [self.prefix_token_id]
        new: list[int] = []
        text = ""
        with autocast(self._device.type, self.dtype):
            for token in self.model.stream(
                torch.tensor([ids], device=self._device),
                int(min(keys["max_gen_toks"], most_new_tokens(self.model, len(ids)))),
                temperature=keys.get("temperature", 0.0),
                top_k=keys.get("top_k") or None,
                top_p=keys.get("top_p"),
                n_tokens=self.coder.vocab_size,
            ):
                if int(token) in self.ends:
                    break
                new.append(int(token))
                text = self.coder.decode_bytes(new).decode(errors="replace")
                ends = [text.index(stop) for stop in keys["until"] if stop and stop in text]
                if ends:
                    return text[: min(ends)]
        return text


def ids_that_end(file: Path) -> list[int]:
    """The ids that end a text, as an imported model's generation_config.json gives them. Raises
    UserError."""
    if not file.exists():
        return []
    with one_line(f"{file}: its eos_token_id is no id and no list of ids"):
        ends = read_json(file).get("eos_token_id") or []
        if isinstance(ends, int):
            return [ends]
        return [int(token) for token in ends]


def main(argv: list[str]) -> None:
    sys.argv[1:] = argv
    cli_evaluate()


if __name__ == "__main__":
    configurator.run(main)
