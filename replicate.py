"""The 1B models of Qiu et al. (2025): sink, gate and perplexity, beside those of an independent measurement.

    python data/text/prepare.py book.txt --tokenizer=1B_baseline --out_dir=data/qiu
    python replicate.py 1B_baseline 1B_gate_headwise 1B_gate_elementwise --dataset=data/qiu

The folders are those of the hub, in this order. meters.py and evaluate.py measure them; their JSON stays in out_dir.
The text of the independent measurement is not known here: only differences between models compare.
Not run here: nobody has read the published weights with this code. By arithmetic, for 1.7 billion parameters a model:
disk 3.5 GB, memory 11 GB for the weights and 3 GB for a row of 2,048 tokens, 3.4 TFLOPs for a thousand tokens. With a
validation split of 200,000 tokens that is 45 minutes on a CPU of 0.3 TFLOP/s, and a minute on a GPU of 30 TFLOP/s.
"""

from dataclasses import dataclass

import configurator
from configurator import key
from runs.files import find_data


@dataclass
class ReplicateConfig:
    folders: list[str] = key([], "the folders of the baseline, the headwise and the elementwise model")
    dataset: str | None = key(None, "folder of the data, in the tokens of the models", find=find_data)
    out_dir: str = key("out/replication", "folder for the JSON of meters.py and evaluate.py")


configurator.begin(__name__, ReplicateConfig, __doc__, positional="folders")

from pathlib import Path

import evaluate
import meters
from configurator import UserError
from runs.files import read_json
from runs.probe import mean_by_position, mean_of
from study.page import aligned

# sink, mean gate, perplexity
THERE = {"baseline": (0.427, None, 13.25), "headwise": (0.0525, 0.257, 13.18), "elementwise": (0.0187, 0.14, 13.24)}


def main(argv: list[str]) -> None:
    config = configurator.load(ReplicateConfig, argv, positional="folders")
    if len(config.folders) != 3 or config.dataset is None:
        raise UserError("name three folders, the baseline, headwise and elementwise model, and --dataset=FOLDER")
    out, rows = Path(config.out_dir), [["model", "sink", "there", "gate", "there", "perplexity", "there"]]
    out.mkdir(parents=True, exist_ok=True)
    for folder, (name, there) in zip(config.folders, THERE.items(), strict=True):
        words = [f"--checkpoint={folder}", f"--dataset={config.dataset}", "--dtype=float32"]
        meters.main([*words, "--rows=1", "--score_batches=1", f"--out={out / f'{name}_meters.json'}"])
        evaluate.main([*words, "--batch_size=1", f"--out={out / f'{name}.json'}"])
        layers = read_json(out / f"{name}_meters.json")["checkpoints"][0]["layers"]
        sink, gate = mean_of([at["sink"] for at in layers], "share"), mean_by_position(layers, "mean").get("readout")
        here = (sink, gate, read_json(out / f"{name}.json")["perplexity"])
        values = [value for pair in zip(here, there, strict=True) for value in pair]
        rows.append([name, *("-" if value is None else f"{value:.4g}" for value in values)])
    print("", *aligned(rows), sep="\n")


if __name__ == "__main__":
    configurator.run(main)
