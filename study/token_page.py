"""Writes page.html, on which one looks at a text token by token, in a browser and without a
network.

    python plot.py out --html=true                         the first row that meters.py read for out/meters.json
    python plot.py out --html=true --text="To be, or not"  a text of one's own

The page shows the last checkpoint of meters.json. Histograms and means are copied from there, and
the numbers of single tokens come from the functions that meters.py takes its means of.
study/token_page.html is its text and code.
"""

import base64
import json
import os
from pathlib import Path

import torch

from base.files import check_output, read_json, write_text
from configurator import UserError
from data.tokenizer import tokenizer_of
from model import Softmax
from ops.fast import at_least_float32
from runs import probe
from runs.checkpoint import check_vocabulary, data_of, load_model
from runs.hardware import Processes
from runs.recorder import Seen
from study.page import policy_of

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_BYTES, MOST_TOKENS = 2_900_000, 256
BYTES_OF_WEIGHT, UNIT = 8 / 3, 1 / 32767  # 16 bits in base64; a weight is that many units
BYTES_OF_TOKEN = 48  # a head's gate, sink, effective sink and what it writes, as text


def write_page(path: Path, text: str | None = None) -> Path:
    """Writes page.html beside a meters.json, which is `path` or lies in it. Returns its path;
    raises UserError. text: what to show; None: the first row that meters.py read. Either is cut to
    what fits in 3 MB."""
    file = path if path.suffix == ".json" else path / "meters.json"
    if not os.path.isfile(file):
        raise UserError(
            f"{file}: no such file; run python meters.py --checkpoint={file.parent} first"
        )
    out = file.with_name("page.html")
    check_output(out, "page of a text")
    meters = read_json(file)["checkpoints"][-1]
    model, checkpoint = load_model(meters["checkpoint"], Processes("auto", 0).device)
    if "folder" not in meters or checkpoint.get("iter_num") != meters["step"]:
        raise UserError(
            f"{file}: is older than {meters['checkpoint']} or than this version; run meters.py again"
        )
    dataset = data_of(checkpoint, meters["folder"])
    check_vocabulary(model.config.vocab_size, checkpoint, dataset)
    tokenizer = (
        tokenizer_of(dataset) if dataset.kind == "stream" or dataset.alphabet is not None else None
    )
    if text is None:
        ids = probe.first_rows(dataset, meters["split"], 1, model.config.block_size)[0][0].tolist()
    elif tokenizer is None:
        raise UserError(
            f"text={text!r}: the ids of {dataset.folder} stand for no text; leave --text out"
        )
    else:
        ids = [*dataset.first_ids, *tokenizer.encode(text)][: model.config.block_size]
        if len(ids) < 2:
            raise UserError(
                f"text={text!r}: give at least two tokens, since a single one has no other to look at"
            )
    words = map(str, ids)
    if tokenizer is not None:  # bytes that are no whole character are shown as \xe4
        words = (
            tokenizer.decode_bytes([i]).decode(errors="backslashreplace") or "<s>" for i in ids
        )
    template = TEMPLATE.read_text(encoding="utf-8")
    template = template.replace("{POLICY}", policy_of(template))
    # are not shown
    about = {name: value for name, value in meters.items() if name not in ("maps", "pruning")}
    room = MOST_BYTES - len(template) - len(json.dumps(about))
    heads, n = sum(block.mixer.n_head for block in model.blocks), MOST_TOKENS
    while n > 2 and heads * (BYTES_OF_WEIGHT * n * (n + 1) / 2 + BYTES_OF_TOKEN * n) > room:
        n -= 1
    ids = ids[:n]
    inputs = torch.tensor([ids], device=model.wte.weight.device)
    masks = probe.query_masks(inputs, dataset.kinds)
    page = {
        "meters": about,
        "is_own_text": text is not None,
        "is_text": dataset.kind == "stream",
        "tokens": list(words)[:n],
        "kinds": {
            name: mask[0].nonzero().flatten().tolist()
            for name, mask in masks.items()
            if name != "other"
        },
        "layers": probe.probe(model, inputs, measure, meters["dtype"]),
    }
    data = json.dumps(page).replace("<", "\\u003c")  # a token may be </script>
    write_text(out, template.replace("{DATA}", data))
    return out


def measure(seen: Seen) -> dict:
    """What the page shows of a layer's T tokens: {name: a number of each token, by head (H, T), or
    None}. weights: for all heads and queries in turn the weights of the keys up to the query, in
    UNITs, int16 in base64. They are those of the attention in softmax layers, and shares of their
    absolute sum in others."""
    gate, packed = probe.head_gates(seen), None
    numbers: dict = dict.fromkeys(("share", "effective", "writes"))
    if seen.readout is not None:
        o = at_least_float32(seen.readout).unflatten(-1, (seen.mixer.n_head, -1))  # (1, T, H, D)
        numbers["writes"] = probe.written_by_heads(seen, o)
    numbers["gate"] = None if gate is None else gate.transpose(1, 2)  # (1, H, T)
    if seen.has_weights:
        by_query = probe.query_meters(seen)
        numbers |= {name: by_query[name] for name in ("share", "effective")}
        weights = probe.weights_of(seen)[0]  # (H, T, T)
        if not isinstance(seen.mixer, Softmax):
            weights = weights / weights.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        rows, columns = torch.tril_indices(*weights.shape[1:])
        units = (weights[:, rows, columns] / UNIT).round().cpu().numpy()
        packed = base64.b64encode(units.astype("<i2").tobytes()).decode()
    of_tokens = {
        name: None if values is None else probe.numbers(values[0])
        for name, values in numbers.items()
    }
    return of_tokens | {"weights": packed}
