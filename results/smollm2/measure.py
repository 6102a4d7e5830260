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
import numpy as np
import torch.nn.functional as F
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
OF_HEADS = ("share", "effective", "entropy", "value_norm")
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
    content = (ROOT / f"out/texts/val/{text}.txt").read_text(encoding="utf-8")
    ids = choose_tokenizer(MODEL, []).encode_array(content)
    windows = torch.from_numpy(ids.astype("int64")).unfold(0, length + 1, 1)
    return windows[torch.arange(n_rows) * (len(windows) - 1) // (n_rows - 1)]


def with_bos(row: torch.Tensor, has_bos: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """row (T + 1,) -> inputs and targets (1, T). With BOS in front of the row, the token behind it has no label."""
    row = row[None]
    if has_bos:
        return F.pad(row[:, :-2], (1, 0), value=BOS), F.pad(row[:, 1:-1], (1, 0), value=IGNORE)
    return row[:, :-1], row[:, 1:]


@torch.no_grad()
def measured(model, in_eight_bits, inputs: torch.Tensor, targets: torch.Tensor) -> dict:
    """All numbers of one row (1, T), by layer and head."""

    def of_layer(seen):
        sink = probe.sink_meter(seen, {})
        size = seen.residual[0].abs()  # (T, C)
        numbers = {name: sink[name] for name in OF_HEADS}
        numbers["max"] = float(size.max())
        numbers["over_median"] = float(size.max() / size.median())
        numbers["position"], numbers["channel"] = divmod(int(size.argmax()), size.shape[1])
        return numbers

    by_layer, hidden = probe.probe(model, inputs, of_layer)
    row = {"loss": float(losses_of(model.logits(hidden), targets))}
    row["loss in 8 bits"] = float(losses_of(in_eight_bits(inputs), targets))
    return row | {name: [layer[name] for layer in by_layer] for name in by_layer[0]}


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats a label, of each row."""
    return token_losses(logits, targets).sum(1) / (targets != IGNORE).sum(1)


def append(file: str, row: dict) -> None:
    with open(HERE / file, "a", encoding="utf-8") as f:
        f.write(json.dumps(row) + "\n")


def measure(file: str, path: str, name: str, length: int, with_and_without: tuple) -> None:
    """Adds the rows of a checkpoint that the file lacks."""
    there = read_jsonl(HERE / file)
    done = {(row["model"], row["text"], row["bos"], row["row"]) for row in there}
    model, _ = load_model(path)
    in_eight_bits = copy.deepcopy(model)
    quantise(in_eight_bits)
    for text in TEXTS:
        rows = rows_of(text, ROWS, length)
        for bos in with_and_without:
            for i, row in enumerate(rows):
                if (name, text, bos, i) in done:
                    continue
                about = {"model": name, "text": text, "bos": bos, "row": i, "tokens": length}
                numbers = measured(model, in_eight_bits, *with_bos(row, bos))
                append(file, about | rounded(numbers))
            print(f"{name}, {text}, {'with' if bos else 'without'} BOS: {len(rows)} rows")


def rounded(x):
    """Numbers to five digits."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def published():
    measure("rows.jsonl", MODEL, "published", 1024, (True, False))
    model, _ = load_model(MODEL)
    inputs = torch.cat([rows_of(text, 2, 1024)[:, :-1] for text in TEXTS])
    scores = probe.induction_meters(model, inputs, "float32")
    (HERE / "induction.json").write_text(json.dumps(rounded(scores)) + "\n", encoding="utf-8")


def arms():
    for arm in ARMS:
        path = ROOT / f"results/smollm2_gate/{arm}-seed1/{AT}"
        if path.is_file():
            measure("arms.jsonl", str(path), arm, 512, (False,))


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
    model, _ = load_model(MODEL)
    pairs = [with_bos(row, True) for text in TEXTS for row in rows_of(text, 2, 512)]
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    whole = list(range(model.config.n_head))

    def write(layer, closed_heads):
        losses = losses_of(model(inputs), targets)
        row = {"layer": layer, "heads": closed_heads, "losses": rounded(losses.tolist())}
        append("heads.jsonl", row)

    write(None, [])
    for i, block in enumerate(model.blocks):
        for closed_heads in (*[[head] for head in whole], whole):
            closed(block.mixer, closed_heads)
            write(i, closed_heads)
        del block.mixer.attend
    for block in model.blocks:
        closed(block.mixer, whole)
    write("all", whole)


# -- Tables ------------------------------------------------------------------------------------------------------------


def interval(values: list[float], digits: str) -> str:
    mean = np.mean(values)
    half = scipy_stats.t.ppf(0.975, len(values) - 1) * scipy_stats.sem(values)
    return f"{mean:{digits}} ({mean - half:{digits}} to {mean + half:{digits}})"


def mean_over(row: dict, name: str, where: slice = DEEP) -> float:
    """Over the heads of these layers."""
    return float(np.mean(row[name][where]))


NUMBERS = {
    "weight on the first token, layers 12 to 29": (lambda row: mean_over(row, "share"), ".3f"),
    "... of the head that has most": (lambda row: np.max(row["share"]), ".3f"),
    "... layers 0 to 11": (lambda row: mean_over(row, "share", slice(12)), ".3f"),
    "what is written of it, over the stream": (lambda row: mean_over(row, "effective"), ".4f"),
    "norm of its value, over the median": (lambda row: mean_over(row, "value_norm"), ".3f"),
    "entropy of a head's weights, nats": (lambda row: mean_over(row, "entropy"), ".2f"),
    "largest activation": (lambda row: max(row["max"]), ",.0f"),
    "... over the layer's median": (lambda row: max(row["over_median"]), ",.0f"),
    "loss, nats a token": (lambda row: row["loss"], ".3f"),
    "what 8 bits cost": (lambda row: row["loss in 8 bits"] - row["loss"], ".3f"),
}


def cell(name: str, rows: list[dict]) -> str:
    """One of NUMBERS, over rows."""
    number_of, digits = NUMBERS[name]
    return interval([number_of(row) for row in rows], digits)


def print_table(header: list[str], lines: list[list[str]]) -> None:
    for line in (header, ["---"] * len(header), *lines):
        print("| " + " | ".join(line) + " |")


def tables():
    rows = read_jsonl(HERE / "rows.jsonl")
    columns = {}
    for text in TEXTS:
        for bos, word in ((True, "BOS"), (False, "no BOS")):
            of_column = [row for row in rows if (row["text"], row["bos"]) == (text, bos)]
            columns[f"{text}, {word}"] = of_column
    lines = [[name, *[cell(name, column) for column in columns.values()]] for name in NUMBERS]
    print_table(["", *columns], lines)
    print()
    changes = table_of_heads()
    draw_layers(rows, changes)
    if (HERE / "arms.jsonl").is_file():
        table_of_arms()


def draw_layers(rows: list[dict], changes: dict[int, float]) -> None:
    """layers.png: what each layer gives the first token, how large its stream is, and whether it needs the token."""
    figure, axes = plt.subplots(3, 1, figsize=(5.5, 7), sharex=True, layout="constrained")
    for text, style in zip(TEXTS, ("-", "--"), strict=True):
        of_text = [row for row in rows if row["text"] == text and row["bos"]]
        weight = 100 * np.mean([row["share"] for row in of_text], axis=2)  # (rows, layers)
        largest = np.mean([row["max"] for row in of_text], axis=0)
        look = {"color": COLOURS[text]}
        axes[0].plot(weight.T, alpha=0.15, linewidth=0.8, **look)
        axes[0].plot(weight.mean(0), linewidth=2.5, label=text.capitalize(), **look)
        axes[1].semilogy(largest, linewidth=2.5, linestyle=style, **look)
    by_layer = {i: change for i, change in changes.items() if i != "all"}
    axes[2].bar(by_layer.keys(), by_layer.values(), color="#666666")
    axes[0].set_ylabel("weight on the first token, %")
    axes[0].set_title("From layer 12 on, half of the weight is on the first token", fontsize=11)
    axes[0].legend(loc="upper left")
    axes[1].set_ylabel("largest |activation|")
    axes[1].set_title("Where that sink is, one activation is huge", fontsize=11)
    axes[2].set_ylabel("rise of the loss, nats   ← better")
    most = max(by_layer, key=by_layer.get)
    title = f"Layer {most} needs it most: the loss if its heads do not see it"
    axes[2].set_title(title, fontsize=11)
    axes[2].set_xlabel("layer of SmolLM2-135M-Instruct")
    figure.savefig(HERE / "layers.png", dpi=120)


def table_of_heads() -> dict:
    """Prints it, and returns {layer or "all": the change of the loss if none of its heads sees the first token}."""
    whole, *rows = read_jsonl(HERE / "heads.jsonl")
    single = {}
    of_layers = {}
    for row in rows:
        change = float(np.mean(row["losses"]) - np.mean(whole["losses"]))
        if len(row["heads"]) == 1:
            single[row["layer"], row["heads"][0]] = change
        else:
            of_layers[row["layer"]] = change
    in_order = sorted(single, key=single.get, reverse=True)
    print(
        f"Closed for one head, the loss changes by {single[in_order[-1]]:.4f} to {single[in_order[0]]:.4f} nats; "
        f"by more than 0.01 for {sum(x > 0.01 for x in single.values())} of {len(single)} heads."
    )
    for layer, head in in_order[:5]:
        print(f"  layer {layer}, head {head}: {single[layer, head]:+.4f}")
    words = [f"{layer}: {change:+.3f}" for layer, change in of_layers.items()]
    print("By layer, all heads: " + ", ".join(words))
    print()
    return of_layers


def table_of_arms():
    """Each arm beside its twin, whose rows stand in the same order."""
    rows = read_jsonl(HERE / "arms.jsonl")
    of_arms = {}
    for arm in ARMS:
        of_arm = [row for row in rows if row["model"] == arm]
        if of_arm:
            of_arms[arm] = of_arm
    names = [name for name in NUMBERS if "0 to 11" not in name and "most" not in name]
    lines = [[arm, *[cell(name, of_arm) for name in names]] for arm, of_arm in of_arms.items()]
    print_table(["arm", *names], lines)
    weight_of, _ = NUMBERS["weight on the first token, layers 12 to 29"]
    cost_of, _ = NUMBERS["what 8 bits cost"]
    least = probe.baseline(512)
    halves = {"above": 0, "sides": 1}
    twin = of_arms.pop("none")
    for arm, of_arm in of_arms.items():
        weights = []
        costs = []
        losses = []
        for a, b in zip(of_arm, twin, strict=True):
            weights.append(0.5 * (weight_of(b) - least) - (weight_of(a) - least))
            costs.append(0.5 * cost_of(b) - cost_of(a))
            losses.append(a["loss"] - b["loss"])
        asked = {
            "halves the weight's excess": (weights, halves),
            "halves what 8 bits cost": (costs, halves),
            "loss within 0.01": (losses, {"within": 0.01}),
        }
        kind = "" if arm == JUDGED else "exploratory: "
        for (word, (values, _)), found in zip(
            asked.items(), judge(list(asked.values())), strict=True
        ):
            p = found.get("p_holm", found.get("p_within_holm"))
            change = interval(values, "+.4f")
            print(f"{arm}: {word}: {kind}{found['verdict']}, {change}, p (Holm) {p:.2g}")


if __name__ == "__main__":
    configurator.run(main)
