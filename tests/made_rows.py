"""Rows of experiments made by hand, for the tests of what is made of rows: claims, rates, figures, tables."""

import json
from pathlib import Path

import experiment
from study.plan import runs_of

DATA = dict(slices="32/4", vocab_size=16, train_size=200, val_size=50)
BASE = {"n_head": 2, "dtype": "float32"}


def made_row(run, value, metric="accuracy"):
    """A row as a finished run writes it, with that value of the metric."""
    row = run | {"finite": value is not None, "accuracy": 0.5, "val_loss": 1.0, "metric": metric, metric: value}
    row |= {"curve": [[0, 0.1], [50, 0.5], [100, value or 0.0]], "horizon": 100}
    return row | {"seconds": 36.0, "scores": {}}


def rows_of(config, value=lambda run: 0.5):
    """A row of every run that is compared, with the value of the metric that value(run) gives."""
    return [made_row(run, value(run), config.metric) for run in every_run(config)]


def every_run(config):
    """The runs that are compared, at the learning rates of their keys."""
    return runs_of(config, dict.fromkeys(config.arms))


def listed(**keys):
    arms = {"none": {"gate": "none"}, "gated": {"gate": "elementwise"}}
    keys = dict(name="listed", arms=arms, seeds=[0, 1], data=DATA, base=BASE) | keys
    config = experiment.ExperimentConfig(**keys)
    config.asked = keys
    return config


def show(config, out_dir):
    """What experiment.py makes of the rows in out_dir."""
    keys = config.asked | {"run": False, "out_dir": str(out_dir)}
    experiment.main([f"--config_override={json.dumps(keys)}"])


def write_rows(out_dir, rows, name="rows.jsonl"):
    out_dir.mkdir(exist_ok=True)
    (out_dir / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def line_of(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


GAIN = "gated - none"
ROOT = Path(experiment.__file__).parent
