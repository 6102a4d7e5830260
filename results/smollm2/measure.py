"""
Measures SmolLM2-135M-Instruct: its sinks and outliers, which sinks it needs, and what new gates change.

    python results/smollm2/texts.py
    python results/smollm2/measure.py published    # rows.jsonl: 16 rows of 1,024 tokens of each text, with BOS or not
    python results/smollm2/measure.py heads        # heads.jsonl: the loss if one head cannot see the first token
    python results/smollm2/measure.py arms         # arms.jsonl: the checkpoints of config/experiments/smollm2_gate.py
    python results/smollm2/measure.py tables       # tables of these files, as Markdown, and layers.png

Each adds the rows that its file lacks. All is computed in float32, the 302 passes of `heads` in bfloat16. Rows are
spread evenly over a held-out text. An interval is Student's, of 95%, over rows.
"""

import copy
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
from scipy import stats as scipy_stats

from base import configurator
from base.configurator import UserError
from base.files import read_jsonl
from data.tokenizer import choose_tokenizer
from evaluate import quantise
from model import token_losses
from ops import IGNORE, layers
from runs import probe
from runs.checkpoint import load_model
from study.stats import judge

MODEL = "out/smollm2/exported"
TEXTS = ("english", "python")
BOS = 1  # the model's own
ROWS = 16
COLOURS = {"english": "#d97706", "python": "#0369a1"}
OF_HEADS = ("share", "effective", "entropy")
DEEP = slice(12, 30)  # the layers in which the first token is a sink
ARMS = ("none", "elementwise x10", "elementwise", "headwise", "gates alone x10", "sink")
JUDGED = "elementwise x10"
AT = "ckpt-122.pt"


def main(argv):
    tasks = {"published": published, "heads": heads, "arms": arms, "tables": tables}
    if len(argv) != 1 or argv[0] not in tasks:
        raise UserError(f"name one of {', '.join(tasks)}")
    tasks[argv[0]]()


# -- What is measured --------------------------------------------------------------------------------------------------


def rows_of(text: str, n_rows: int, length: int) -> torch.Tensor:
    """(n_rows, length + 1) ids, spread evenly over a held-out text."""
    ids = choose_tokenizer(MODEL, []).encode_array(
        (ROOT / f"out/texts/val/{text}.txt").read_text(encoding="utf-8")
    )
    ids = torch.from_numpy(ids.astype("int64"))
    starts = [i * (len(ids) - length - 1) // (n_rows - 1) for i in range(n_rows)]
    return torch.stack([ids[start : start + length + 1] for start in starts])


def with_bos(row: torch.Tensor, has_bos: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """row (T + 1,) -> inputs and targets (1, T). The token behind BOS has no label: without BOS it has none either."""
    inputs, targets = row[:-1].clone(), row[1:].clone()
    if has_bos:
        inputs[1:] = row[:-2]
        inputs[0] = BOS
        targets[1:] = row[1:-1]
        targets[0] = IGNORE
    return inputs[None], targets[None]


def measured(model, in_eight_bits, inputs: torch.Tensor, targets: torch.Tensor) -> dict:
    """All numbers of one row (1, T), by layer and head."""

    def of_layer(seen):
        sink = probe.sink_meter(seen, {})
        size = seen.residual[0].abs()  # (T, C)
        position, channel = divmod(int(size.argmax()), size.shape[1])
        numbers = {name: sink[name] for name in (*OF_HEADS, "value_norm")}
        largest = {"max": float(size.max()), "over_median": float(size.max() / size.median())}
        return numbers | largest | {"position": position, "channel": channel}

    by_layer, hidden = probe.probe(model, inputs, of_layer)
    row = {"loss": loss_of(model, hidden, targets)}
    with torch.no_grad():
        row["loss in 8 bits"] = loss_of(in_eight_bits, in_eight_bits.features(inputs)[0], targets)
    return row | {name: [layer[name] for layer in by_layer] for name in by_layer[0]}


@torch.no_grad()
def loss_of(model, hidden: torch.Tensor, targets: torch.Tensor) -> float:
    """Nats a label."""
    return float(token_losses(model.logits(hidden), targets).sum() / (targets != IGNORE).sum())


def append(file: str, row: dict) -> None:
    with open(HERE / file, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


def measure(file: str, path: str, about: dict, length: int, with_and_without: tuple) -> None:
    """Adds the rows of a checkpoint that the file lacks."""
    there = read_jsonl(HERE / file) if (HERE / file).is_file() else []
    done = {(row["model"], row["text"], row["bos"], row["row"]) for row in there}
    model, _ = load_model(path, torch.device("cpu"))
    in_eight_bits = copy.deepcopy(model)
    quantise(in_eight_bits)
    for text in TEXTS:
        rows = rows_of(text, ROWS, length)
        for bos in with_and_without:
            for i, row in enumerate(rows):
                if (about["model"], text, bos, i) in done:
                    continue
                numbers = measured(model, in_eight_bits, *with_bos(row, bos))
                append(
                    file,
                    about
                    | {"text": text, "bos": bos, "row": i, "tokens": length}
                    | rounded(numbers),
                )
            print(f"{about['model']}, {text}, {'with' if bos else 'without'} BOS: {len(rows)} rows")


def rounded(x):
    """Numbers to five digits."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def published():
    measure("rows.jsonl", MODEL, {"model": "published"}, 1024, (True, False))
    model, _ = load_model(MODEL, torch.device("cpu"))
    inputs = torch.cat([rows_of(text, 2, 1024)[:, :-1] for text in TEXTS])
    scores = probe.induction_meters(model, inputs, "float32")
    (HERE / "induction.json").write_text(json.dumps(rounded(scores)) + "\n", encoding="utf-8")


def arms():
    for arm in ARMS:
        path = ROOT / f"results/smollm2_gate/{arm}-seed1/{AT}"
        if path.is_file():
            measure("arms.jsonl", str(path), {"model": arm}, 512, (False,))


# -- Which sinks are needed --------------------------------------------------------------------------------------------


def closed(mixer, closed_heads: list[int]):
    """attend() of a softmax mixer, in which these heads do not see the first token; their other weights grow."""

    def attend(q, k, v, mask, p):
        H, T = q.shape[1:3]
        sees = torch.ones(T, T, dtype=torch.bool).tril().repeat(H, 1, 1)
        sees[closed_heads, 1:, 0] = False
        return layers.attention(q, k, v, sees[None])

    mixer.attend = attend


@torch.no_grad()
@torch.autocast("cpu", torch.bfloat16)
def heads():
    model, _ = load_model(MODEL, torch.device("cpu"))
    pairs = [with_bos(row, True) for text in TEXTS for row in rows_of(text, 2, 512)]
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    streams = [model.wte(inputs)]  # the input of each block
    for block in model.blocks:
        streams.append(block(streams[-1]))
    H = model.config.n_head

    def losses(first_layer):
        x = streams[first_layer]
        for block in model.blocks[first_layer:]:
            x = block(x)
        each = token_losses(model.logits(model.norm(x)), targets).sum(1) / (targets != IGNORE).sum(
            1
        )
        return rounded(each.tolist())

    append("heads.jsonl", {"layer": None, "heads": [], "losses": losses(len(model.blocks) - 1)})
    for i, block in enumerate(model.blocks):
        for closed_heads in (*[[head] for head in range(H)], list(range(H))):
            closed(block.mixer, closed_heads)
            append("heads.jsonl", {"layer": i, "heads": closed_heads, "losses": losses(i)})
            del block.mixer.attend
    for block in model.blocks:
        closed(block.mixer, list(range(H)))
    append("heads.jsonl", {"layer": "all", "heads": list(range(H)), "losses": losses(0)})


# -- Tables ------------------------------------------------------------------------------------------------------------


def interval(values: list[float], digits: str = ".3f") -> str:
    mean = sum(values) / len(values)
    half = scipy_stats.t.ppf(0.975, len(values) - 1) * scipy_stats.sem(values)
    return f"{mean:{digits}} ({mean - half:{digits}} to {mean + half:{digits}})"


def mean_over(row: dict, name: str, where: slice = DEEP) -> float:
    """Over the heads of these layers."""
    numbers = [x for layer in row[name][where] for x in layer]
    return sum(numbers) / len(numbers)


NUMBERS = {
    "weight on the first token, layers 12 to 29": (lambda row: mean_over(row, "share"), ".3f"),
    "... of the head that has most": (lambda row: max(max(layer) for layer in row["share"]), ".3f"),
    "... layers 0 to 11": (lambda row: mean_over(row, "share", slice(0, 12)), ".3f"),
    "what is written of it, over the stream": (lambda row: mean_over(row, "effective"), ".4f"),
    "norm of its value, over the median": (lambda row: mean_over(row, "value_norm"), ".3f"),
    "entropy of a head's weights, nats": (lambda row: mean_over(row, "entropy"), ".2f"),
    "largest activation": (lambda row: max(row["max"]), ",.0f"),
    "... over the layer's median": (lambda row: max(row["over_median"]), ",.0f"),
    "loss, nats a token": (lambda row: row["loss"], ".3f"),
    "what 8 bits cost": (lambda row: row["loss in 8 bits"] - row["loss"], ".3f"),
}


def tables():
    rows = read_jsonl(HERE / "rows.jsonl")
    kinds = [(text, bos) for text in TEXTS for bos in (True, False)]
    print(
        "| | " + " | ".join(f"{text}, {'BOS' if bos else 'no BOS'}" for text, bos in kinds) + " |"
    )
    print("|---" * (len(kinds) + 1) + "|")
    for name, (of, digits) in NUMBERS.items():
        cells = []
        for kind in kinds:
            cells.append(
                interval([of(row) for row in rows if (row["text"], row["bos"]) == kind], digits)
            )
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    changes = table_of_heads()
    draw_layers(rows, changes)
    if (HERE / "arms.jsonl").is_file():
        table_of_arms()


def draw_layers(rows: list[dict], changes: dict[int, float]) -> None:
    """layers.png: what each layer gives the first token, how large its stream is, and whether it needs the token."""
    figure, axes = plt.subplots(3, 1, figsize=(5.5, 7), sharex=True, layout="constrained")
    for text in TEXTS:
        of_text = [row for row in rows if row["text"] == text and row["bos"]]
        weight = [[sum(layer) / len(layer) for layer in row["share"]] for row in of_text]
        for of_row in weight:
            axes[0].plot([100 * x for x in of_row], color=COLOURS[text], alpha=0.15, linewidth=0.8)
        means = [100 * sum(x) / len(x) for x in zip(*weight, strict=True)]
        axes[0].plot(means, color=COLOURS[text], linewidth=2.5, label=text.capitalize())
        largest = [sum(x) / len(x) for x in zip(*(row["max"] for row in of_text), strict=True)]
        axes[1].semilogy(
            largest, color=COLOURS[text], linewidth=2.5, linestyle="-" if text == TEXTS[0] else "--"
        )
    layers_closed = [i for i in changes if i != "all"]
    axes[2].bar(layers_closed, [changes[i] for i in layers_closed], color="#666666")
    axes[0].set_ylabel("weight on the first token, %")
    axes[0].set_title("From layer 12 on, half of the weight is on the first token", fontsize=11)
    axes[0].legend(loc="upper left")
    axes[1].set_ylabel("largest |activation|")
    axes[1].set_title("Where that sink is, one activation is huge", fontsize=11)
    axes[2].set_ylabel("rise of the loss, nats   ← better")
    most = max(layers_closed, key=changes.__getitem__)
    title = f"Layer {most} needs it most: the loss if its heads do not see it"
    axes[2].set_title(title, fontsize=11)
    axes[2].set_xlabel("layer of SmolLM2-135M-Instruct")
    figure.savefig(HERE / "layers.png", dpi=120)


def table_of_heads() -> dict:
    """Prints it, and returns {layer or "all": the change of the loss if none of its heads sees the first token}."""
    changes = {}
    for row in read_jsonl(HERE / "heads.jsonl"):
        loss = sum(row["losses"]) / len(row["losses"])
        if row["layer"] is None:
            whole = loss
        changes[row["layer"], tuple(row["heads"])] = loss - whole
    single = {key: change for key, change in changes.items() if len(key[1]) == 1}
    print(
        f"Closed for one head, the loss changes by {min(single.values()):.4f} to {max(single.values()):.4f} nats; "
        f"by more than 0.01 for {sum(x > 0.01 for x in single.values())} of {len(single)} heads."
    )
    for (layer, (head,)), change in sorted(single.items(), key=lambda item: -item[1])[:5]:
        print(f"  layer {layer}, head {head}: {change:+.4f}")
    whole_layers = {key[0]: change for key, change in changes.items() if len(key[1]) > 1}
    print(
        "By layer, all heads: "
        + ", ".join(f"{layer}: {change:+.3f}" for layer, change in whole_layers.items())
    )
    print()
    return whole_layers


def table_of_arms():
    rows = read_jsonl(HERE / "arms.jsonl")
    numbers = [name for name in NUMBERS if "0 to 11" not in name and "most" not in name]
    names = [arm for arm in ARMS if any(row["model"] == arm for row in rows)]
    print("| arm | " + " | ".join(numbers) + " |")
    print("|---" * (len(numbers) + 1) + "|")
    for arm in names:
        cells = []
        for name in numbers:
            of, digits = NUMBERS[name]
            cells.append(interval([of(row) for row in rows if row["model"] == arm], digits))
        print(f"| {arm} | " + " | ".join(cells) + " |")
    baseline = probe.baseline(512)
    weight, cost = (
        NUMBERS[name][0]
        for name in ("weight on the first token, layers 12 to 29", "what 8 bits cost")
    )
    twin = {(row["text"], row["row"]): row for row in rows if row["model"] == "none"}
    for arm in names[1:]:
        pairs = [(row, twin[row["text"], row["row"]]) for row in rows if row["model"] == arm]
        asked = [
            (
                [0.5 * (weight(b) - baseline) - (weight(a) - baseline) for a, b in pairs],
                {"above": 0, "sides": 1},
            ),
            ([0.5 * cost(b) - cost(a) for a, b in pairs], {"above": 0, "sides": 1}),
            ([a["loss"] - b["loss"] for a, b in pairs], {"within": 0.01}),
        ]
        words = ("halves the weight's excess", "halves what 8 bits cost", "loss within 0.01")
        for word, (values, _), found in zip(words, asked, judge(asked), strict=True):
            p = found.get("p_holm", found.get("p_within_holm"))
            kind = "" if arm == JUDGED else "exploratory: "
            print(
                f"{arm}: {word}: {kind}{found['verdict']}, {interval(values, '+.4f')}, p (Holm) {p:.2g}"
            )


if __name__ == "__main__":
    configurator.run(main)
