"""
A gate on a published model: Qwen3-0.6B with an elementwise gate that starts at the same function, trained on your text.

    python data/text/prepare.py book.txt --tokenizer=Qwen3-0.6B --out_dir=data/qwen3
    python train.py config/late_gate_qwen.py
    python train.py config/late_gate_qwen.py --gate=none --out_dir=out/plain_qwen
    python meters.py --checkpoint=Qwen3-0.6B,out/plain_qwen,out/gated_qwen --dataset=data/qwen3
    python plot.py out/gated_qwen out/gated_qwen/meters.json
    python hub/export.py --checkpoint=out/gated_qwen --to_hf=gated --family=qwen3_5_text

The second run trains as long without a gate, since training on a text lowers its loss in any case. meters.py prints the
loss and the sinks of the published model, of the model without a gate and of the gated one. transformers loads the
folder gated/ as a Qwen3.5, whose attention has such gates.

Not run on the published weights yet: a test runs it on a random model of the same family.
"""

init_from = "Qwen3-0.6B"
dataset = "data/qwen3"
out_dir = "out/gated_qwen"

gate = "elementwise"
gate_activation = "sigmoid2"
gate_lr_scale = 10

block_size = 1024
batch_size = 1
gradient_accumulation_steps = 8
max_iters = 500
learning_rate = 2e-5
warmup_iters = 50
eval_interval = 100
