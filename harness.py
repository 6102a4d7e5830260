"""EleutherAI's lm-evaluation-harness on a checkpoint: its commands, with one more model, nanogate.

    pip install lm-eval
    python harness.py run --model nanogate --model_args checkpoint=out/best.pt --tasks NAME --include_path FOLDER
    torchrun --standalone --nproc_per_node=8 harness.py run ...        on 8 GPUs, each with documents of its own

The words are those of `lm-eval` (see its documentation); FOLDER may hold task files of your own.
Without --device it is a GPU where there is one, and else the CPU. model_args are the checkpoint and
the dtype of matrix products (the run's if it isn't given). A context is read once for all of its
continuations, together with contexts of about its length: at most --batch_size of either at once
(with `run` 16). The last block_size tokens of a text are read, for scores as the harness does it
for other models; an answer ends early where cosformer or learned positions end. Special tokens are
those of an imported model's generation_config.json; without it GPT-2's end of text, or for other
tokenizers a line end before a text. What an imported model's tokenizer.json puts before a text, as
Llama's does, stands before every text, and is not counted as a part of it. Where a token would span
the join of a context and a continuation, the continuation is encoded alone; one without tokens is
refused.
"""

import configurator

if __name__ == "__main__":
    configurator.set_up()

import datetime
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from base.files import find_checkpoint, read_json
from base.rules import wrong_field
from configurator import UserError, show
from data.meta import MAX_VOCAB
from data.tokenizer import END_OF_TEXT, tokenizer_of_checkpoint
from evaluate import CHUNK_TOKENS
from model import GPT, token_losses
from ops import IGNORE
from ops.sampling import check_finite, most_new_tokens
from runs.checkpoint import check_same_weights, load_model
from runs.hardware import DTYPES, Processes, autocast, pick_dtype

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise SystemExit("error: lm-eval is not installed: pip install lm-eval") from None

ROWS = 16  # that are read at once, unless --batch_size says otherwise
MOST_LONGER = 8  # ids by which a context may be longer than the shortest that it is read with
# the first one counts
MOST_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("nanogate")
class NanogateLM(TemplateLM):
    """A checkpoint as the harness sees a model: strings in, log-likelihoods and strings out."""

    def __init__(
        self,
        checkpoint="out/best.pt",
        dtype: str | None = None,
        device=None,
        batch_size=None,
        max_batch_size=None,
        **others,
    ):
        super().__init__()
        if others:
            raise UserError(
                f"model_args: {next(iter(others))!r} is none; write checkpoint=PATH,dtype=NAME"
            )
        # cuda:0 is lm-eval's own default; under torchrun the library gives each process documents
        # of its own
        device, wait = "auto" if device in (None, "cuda:0") else device, datetime.timedelta(days=7)
        self.processes = Processes(device, 0, wait)
        self._rank, self._world_size = self.processes.rank, self.processes.world_size
        self._device = torch.device(self.processes.device)
        self.model, loaded = load_model(checkpoint, self.processes.device)
        check_same_weights(self.processes, checkpoint)
        dtype = dtype or loaded.get("dtype", "float32")
        configurator.check_choice("dtype", dtype, tuple(DTYPES))
        self.dtype = self.processes.from_main(pick_dtype(dtype, self.processes.device_type))
        self.coder = tokenizer_of_checkpoint(checkpoint, loaded.get("data", {}))
        first, ends = special_tokens(
            find_checkpoint(checkpoint).with_name("generation_config.json")
        )
        self.first = first  # the id before an empty text, or None
        self.ends = [END_OF_TEXT] if self.coder.name == "gpt2" else ends
        # the ids before every text, which a data set or the tokenizer.json of an imported model has
        self.first_ids = loaded.get("data", {}).get("first_ids", [])
        self.batch_size = max(1, int(batch_size)) if str(batch_size).isdecimal() else ROWS
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
        if self.first_ids:
            return self.first_ids[-1]
        return self.eot_token_id if self.first is None else self.first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **keys: object
    ) -> list[int]:
        """The ids of a text, behind first_ids. A text that spells them out, as a template may, gets
        them once."""
        if add_special_tokens is False or not self.first_ids:
            return self.coder.encode(string)
        spelled = self.coder.decode_bytes(self.first_ids).decode(errors="replace")
        return [*self.first_ids, *self.coder.encode(string.removeprefix(spelled))]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of its continuation. Spaces at the end of the context belong to
        the continuation, as in the library's own models. Where a token spans the join, the
        continuation is encoded alone: of the ids of both together those behind the context's would
        stand for a part of the continuation, or for nothing."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self.tok_encode(stripped)
        whole = self.tok_encode(stripped + continuation)
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
        # behind a line end, since some tokenizers put a space before a text; where a token spans
        # that join, too, the tokenizer has bytes, and puts no space there
        line_end = self.coder.encode("\n")
        whole = self.coder.encode("\n" + continuation)
        if whole[: len(line_end)] == line_end:
            return before, whole[len(line_end) :]
        return before, self.coder.encode(continuation)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """[(its log-likelihood, whether it is the likeliest)] of the continuation of each (context,
        continuation). Raises UserError for a continuation without tokens: it would be likelier than
        any other."""
        encoded = []
        for request in requests:
            context, continuation = self._encode_pair(*request.args)
            if not continuation:
                raise UserError(
                    f"the continuation {show(request.args[1])} has no tokens, so that it has no likelihood"
                )
            encoded.append((request.args, context, continuation))
        return self._loglikelihood_tokens(encoded)

    @torch.no_grad()
    def read(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """[(its log-likelihood, whether each of its tokens is the likeliest)] of the continuations
        of contexts.

        The first n ids of the contexts in a part, all but one of the shortest, are read once for
        all pairs that share them. What is left is read batch_size pairs at once, those of about the
        same length.
        """
        model, device, scores = self.model, self.model.wte.weight.device, {}
        for part in parts_of([context for context, _ in pairs], self.batch_size):
            n = min(len(pairs[i][0]) for i in part) - 1
            starts = {
                ids: row
                for row, ids in enumerate(dict.fromkeys(tuple(pairs[i][0][:n]) for i in part))
            }
            rest = {i: (pairs[i][0][n:], pairs[i][1]) for i in part}
            order = sorted(part, key=lambda i: sum(map(len, rest[i])))
            longest = n + sum(map(len, rest[order[-1]]))
            with autocast(device.type, self.dtype):
                state = model.init_state(len(starts), dtype=model.wte.weight.dtype, length=longest)
                if n:
                    idx = torch.tensor(list(starts), device=device)
                    # for the state alone
                    model.features(idx, state)
                for i in range(0, len(order), self.batch_size):
                    batch = order[i : i + self.batch_size]
                    of_row = torch.tensor(
                        [starts[tuple(pairs[j][0][:n])] for j in batch], device=device
                    )
                    copies = [
                        {name: tensor[of_row] for name, tensor in layer.items()} for layer in state
                    ]
                    scores |= zip(
                        batch, read_on(model, [rest[j] for j in batch], copies, n), strict=True
                    )
        return [scores[i] for i in range(len(pairs))]

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **keys
    ) -> list[tuple[float, bool]]:
        """[(texts, context ids, continuation ids)] -> [(log-likelihood of the continuation, whether
        it is likeliest)]. Raises UserError for a continuation that is longer than the model's
        context."""
        pairs = []
        for _, context, continuation in requests:
            if len(continuation) > self.limit:
                words = f"a continuation of {len(continuation)} tokens is longer than block_size={self.limit}"
                raise UserError(words)
            start = max(0, len(context) + len(continuation) - self.limit - 1)
            pairs.append((context[start:] or [self.prefix_token_id], continuation))
        scores = self.read(pairs)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text: of every token once, after as many as there are in
        the window. The id before a text is no part of it, and is not counted."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])[len(self.first_ids) :]
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.limit, 1)
            scores = self.read([make_disjoint_window(window) for window in windows])
            totals.append(sum(nats for nats, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the request's stop
        strings."""
        texts = []
        for request in requests:
            texts.append(self.write(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def write(self, context: str, keys: dict) -> str:
        until = keys.get("until") or []
        until = [until] if isinstance(until, str) else until
        samples, temperature = keys.get("do_sample"), keys.get("temperature")
        if samples is False or temperature is None:
            temperature = 1.0 if samples else 0.0
        ids = self.tok_encode(context)[-self.limit :] or [self.prefix_token_id]
        asked = next(filter(None, map(keys.get, MOST_NEW)), 256)
        length = int(min(asked, most_new_tokens(self.model, len(ids))))
        idx, new, text = torch.tensor([ids], device=self.model.wte.weight.device), [], ""
        options = dict(
            top_k=keys.get("top_k") or None, top_p=keys.get("top_p"), n_tokens=self.coder.vocab_size
        )
        with autocast(idx.device.type, self.dtype):
            for token in self.model.stream(idx, length, temperature=float(temperature), **options):
                if int(token) in self.ends:
                    break
                new.append(int(token))
                text = self.coder.decode_bytes(new).decode(errors="replace")
                if ends := [text.index(stop) for stop in until if stop and stop in text]:
                    return text[: min(ends)]
        return text


def special_tokens(file: Path) -> tuple[int | None, list[int]]:
    """The id before a text and those that end one, as an imported model's generation_config.json
    gives them. Raises UserError."""
    if not file.exists():
        return None, []
    special, token = read_json(file), (int, 0, MAX_VOCAB)
    ends = special.get("eos_token_id") if isinstance(special, dict) else None
    rule = [token, 0, 999] if isinstance(ends, list) else (*token, None)
    if wrong := wrong_field(special, {"bos_token_id?": (*token, None), "eos_token_id?": rule}):
        raise UserError(f"{file}: {wrong}")
    ends = ends if isinstance(ends, list) else [ends]
    return special.get("bos_token_id"), [token for token in ends if token is not None]


def parts_of(contexts: list[list[int]], most: int) -> list[list[int]]:
    """The indices of at most `most` different contexts of about the same length, for each part that
    is read at once."""
    of_context: dict = {}
    for i, context in enumerate(contexts):
        of_context.setdefault(tuple(context), []).append(i)
    parts: list = []
    for context in sorted(of_context, key=len):
        if not parts or len(parts[-1]) == most or len(context) > len(parts[-1][0]) + MOST_LONGER:
            parts.append([])
        parts[-1].append(context)
    return [[i for context in part for i in of_context[context]] for part in parts]


def read_on(
    model: GPT, pairs: list[tuple], state: list[dict], start: int
) -> list[tuple[float, bool]]:
    """NanogateLM.read of pairs behind `start` ids that the state has read, side by side. What pads
    the shorter rows stands behind them, where no layer looks."""
    rows = [torch.tensor([*context, *continuation[:-1]]) for context, continuation in pairs]
    idx = pad_sequence(rows, batch_first=True).to(model.wte.weight.device)  # (B, T)
    targets = torch.full_like(idx, IGNORE)
    for row, (context, continuation) in zip(targets, pairs, strict=True):
        row[len(context) - 1 :][: len(continuation)] = torch.tensor(continuation, dtype=torch.long)
    labelled = targets != IGNORE
    hidden, _ = model.features(idx, state, start, only=labelled)  # (1, M, C)
    sums, wrong = (
        torch.zeros(len(pairs), dtype=torch.float64),
        torch.zeros(len(pairs), dtype=torch.long),
    )
    parts = (
        part.split(CHUNK_TOKENS)
        for part in (hidden[0], targets[labelled], labelled.nonzero()[:, 0])
    )
    for x, target, row in zip(*parts, strict=True):
        logits = model.logits(x)
        check_finite(logits)
        # on the CPU: MPS has no float64
        of_labels = token_losses(logits, target).cpu().double()
        sums.index_add_(0, row.cpu(), of_labels)
        wrong.index_add_(0, row.cpu(), (logits.argmax(-1) != target).cpu().long())
    return list(zip((-sums).tolist(), (wrong == 0).tolist(), strict=True))


def main(argv: list[str]) -> None:
    if (
        argv[:1] == ["run"]
        and argv[1:]
        and not {word.partition("=")[0] for word in argv} & {"--config", "-C"}
    ):
        # the library's own default is 1; a later word counts more
        argv = ["run", "--batch_size", str(ROWS), *argv[1:]]
    sys.argv = [str(Path(__file__).name), *argv]
    cli_evaluate()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    configurator.run(main)
