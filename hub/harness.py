"""EleutherAI's lm-evaluation-harness on a checkpoint: its commands, with one more model, nanogate.

    pip install lm-eval
    python hub/harness.py run --model nanogate --model_args checkpoint=out/best.pt --tasks NAME --include_path FOLDER
    torchrun --standalone --nproc_per_node=8 hub/harness.py run ...    on 8 GPUs, each with documents of its own

The words are those of `lm-eval` (see its documentation); FOLDER may hold task files of your own.
Without --device it is a GPU where there is one, and else the CPU. model_args are the checkpoint and
the dtype of matrix products (the run's if it isn't given). At most --batch_size rows are read at
once, and of a longer text the last block_size tokens, as the harness does it for other models; an
answer ends early where cosformer or learned positions end. An answer also ends at the eos_token_id
of an imported model's generation_config.json, and at GPT-2's end of text. That id stands before a
text that begins with nothing, or else a line end. What an imported model's tokenizer.json puts
before a text, as Llama's does, stands before every text, and is not counted as a part of it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator

if __name__ == "__main__":
    configurator.set_up()

import datetime

import torch
from torch.nn.utils.rnn import pad_sequence

from base.configurator import UserError
from base.files import find_checkpoint, one_line, read_json
from data.tokenizer import END_OF_TEXT, tokenizer_of_checkpoint
from model import token_losses
from ops.sampling import check_finite, most_new_tokens
from runs.checkpoint import check_same_weights, load_model
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

    def __init__(
        self, checkpoint="out/best.pt", dtype=None, device=None, batch_size=1, max_batch_size=None
    ):
        super().__init__()
        if device in (None, "cuda:0"):  # the latter is lm-eval's own default
            device = "auto"
        # under torchrun the library gives each process documents of its own
        self.processes = Processes(device, 0, datetime.timedelta(days=7))
        self._rank = self.processes.rank
        self._world_size = self.processes.world_size
        self._device = torch.device(self.processes.device)
        self.model, loaded = load_model(checkpoint, self.processes.device)
        check_same_weights(self.processes, checkpoint)
        dtype = dtype or loaded.get("dtype", "float32")
        configurator.check_choice("dtype", dtype, tuple(DTYPES))
        self.dtype = self.processes.from_main(pick_dtype(dtype, self.processes.device_type))
        data = loaded.get("data", {})
        self.coder = tokenizer_of_checkpoint(checkpoint, data)
        self.ends = ids_that_end(find_checkpoint(checkpoint).with_name("generation_config.json"))
        if self.coder.name == "gpt2":
            self.ends = [END_OF_TEXT]
        # the ids before every text, which a data set or the tokenizer.json of an imported model has
        self.first_ids = data.get("first_ids", [])
        self.batch_size = int(batch_size)
        self.limit = self.model.config.block_size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.processes.from_all(tensor.tolist()))

    def gather_object(self, obj: object, dst: int = 0) -> list | None:
        objects = self.processes.from_all(obj)
        return objects if self.rank == dst else None

    def barrier(self) -> None:
        self.processes.from_all(None)

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

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **keys
    ) -> list[tuple[float, bool]]:
        """[(texts, context ids, continuation ids)] -> [(log-likelihood of the continuation, whether
        it is likeliest)]. Raises UserError for a continuation without tokens, or one that is longer
        than the model's context."""
        pairs = []
        for (_, text), context, continuation in requests:
            n = len(continuation)
            if not 1 <= n <= self.limit:
                raise UserError(
                    f"a continuation of {n} tokens cannot be scored (1 to block_size={self.limit}): {text[:99]!r}"
                )
            start = max(0, len(context) + n - self.limit - 1)
            pairs.append((context[start:], continuation))
        return self.scores(pairs)

    @torch.no_grad()
    def scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """[(its log-likelihood, whether each of its tokens is the likeliest)] of the continuations
        of contexts."""
        found = []
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            rows = [torch.tensor(context + continuation[:-1]) for context, continuation in batch]
            # what pads the shorter rows stands behind them, where no layer looks
            idx = pad_sequence(rows, batch_first=True).to(self._device)  # (B, T)
            with autocast(self._device.type, self.dtype):
                hidden, _ = self.model.features(idx)  # (B, T, C)
                for x, (context, continuation) in zip(hidden, batch, strict=True):
                    n = len(continuation)
                    logits = self.model.logits(x[len(context) - 1 :][:n])  # (n, V)
                    check_finite(logits)
                    targets = torch.tensor(continuation, device=self._device)
                    losses = token_losses(logits, targets).cpu()  # MPS has no float64
                    is_likeliest = bool((logits.argmax(-1) == targets).all())
                    found.append((-losses.double().sum().item(), is_likeliest))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text: of every token once, after as many as there are in
        the window. The id before a text is no part of it, and is not counted."""
        totals = []
        for request in requests:
            ids = self.coder.encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.limit, 1)
            scores = self.scores([make_disjoint_window(window) for window in windows])
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
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    configurator.run(main)
