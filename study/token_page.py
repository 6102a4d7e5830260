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
import secrets
from pathlib import Path

import torch

from base.configurator import UserError
from base.files import check_output, read_json, write_text
from data.tokenizer import tokenizer_of
from model import Softmax
from ops.fast import at_least_float32
from runs import probe
from runs.checkpoint import check_vocabulary, data_of, load_model
from runs.hardware import pick_device

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_TOKENS = 256
UNIT = 1 / 32767  # a weight is that many units
# n tokens of a head take 4 / 3 n (n + 27) bytes: weights of 16 bits in base64, and as text the gate,
# the sink, the effective sink and what the head writes
MOST_BYTES = 2_800_000


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
    model, checkpoint = load_model(meters["checkpoint"], pick_device("auto"))
    if checkpoint.get("iter_num") != meters["step"]:
        raise UserError(f"{file}: is older than {meters['checkpoint']}; run meters.py again")
    dataset = data_of(checkpoint, meters["folder"])
    check_vocabulary(model.config.vocab_size, checkpoint, dataset)
    is_text = dataset.kind == "stream"
    tokenizer = tokenizer_of(dataset) if is_text or dataset.alphabet is not None else None
    first = [] if meters.get("first_id") is None else [meters["first_id"]]
    if text is None:
        inputs, _ = probe.first_rows(dataset, meters["split"], 1, model.config.block_size)
        ids = [*first, *inputs[0].tolist()][: inputs.shape[1]]
    elif tokenizer is None:
        raise UserError(
            f"text={text!r}: the ids of {dataset.folder} stand for no text; leave --text out"
        )
    else:
        ids = [*(first or dataset.first_ids), *tokenizer.encode(text)][: model.config.block_size]
    heads = sum(block.mixer.n_head for block in model.blocks)
    n = min(len(ids), MOST_TOKENS)
    while heads * 4 / 3 * n * (n + 27) > MOST_BYTES:
        n -= 1
    ids = ids[:n]
    inputs = torch.tensor([ids], device=model.wte.weight.device)
    page = {
        "meters": {name: value for name, value in meters.items() if name != "maps"},
        "is_own_text": text is not None,
        "is_text": is_text,
        "tokens": [word_of(tokenizer, i) for i in ids],
        "kinds": probe.places_of(probe.query_masks(inputs, dataset.kinds), n),
        "layers": probe.probe(model, inputs, measure, meters["dtype"])[0],
    }
    data = json.dumps(page, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # a token may be </script>
    template = TEMPLATE.read_text(encoding="utf-8")
    # a browser runs the script of this nonce alone, and nothing that a file has brought in
    template = template.replace("{NONCE}", secrets.token_hex(16))
    write_text(out, template.replace("{DATA}", data))
    return out


def word_of(tokenizer, i: int) -> str:
    """The text of a token: bytes that are no whole character as \\xe4, or the id where there is no
    text."""
    if tokenizer is None:
        return str(i)
    return tokenizer.decode_bytes([i]).decode(errors="backslashreplace") or "<s>"


def measure(seen: probe.Seen) -> dict:
    """What the page shows of a layer's T tokens: {name: a number of each token, by head (H, T), or
    None}. weights: for all heads and queries in turn the weights of the keys up to the query, in
    UNITs, int16 in base64. They are those of the attention in softmax layers, and shares of their
    absolute sum in others."""
    shown = dict.fromkeys(("share", "effective", "writes", "gate", "weights"))
    gate = probe.head_gates(seen)
    if gate is not None:
        shown["gate"] = probe.to_json(gate[0].T)
    if seen.readout is not None:
        o = at_least_float32(seen.readout).unflatten(-1, (seen.mixer.n_head, -1))  # (1, T, H, D)
        shown["writes"] = probe.to_json(probe.written_by_heads(seen, o)[0])
    if seen.has_weights:
        by_query = probe.query_meters(seen)
        shown["share"] = probe.to_json(by_query["share"][0])
        shown["effective"] = probe.to_json(by_query["effective"][0])
        weights = probe.weights_of(seen)[0]  # (H, T, T)
        if not isinstance(seen.mixer, Softmax):
            weights = weights / weights.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        rows, columns = torch.tril_indices(*weights.shape[1:])
        units = (weights[:, rows, columns] / UNIT).round().cpu().numpy()
        shown["weights"] = base64.b64encode(units.astype("<i2").tobytes()).decode()
    return shown
