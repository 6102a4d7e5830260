"""
A gate on a published model that starts at the same function, trained on your text: here SmolLM2-135M of `make model`.

    python data/text/prepare.py book.txt --tokenizer=out/smollm2/model.gguf --out_dir=data/smollm2
    python train.py config/late_gate.py
    python train.py config/late_gate.py --gate=none --out_dir=out/twin
    python meters.py --checkpoint=out/smollm2/model.gguf,out/twin,out/late_gate --dataset=data/smollm2 --block_size=512
    python plot.py out/late_gate out/late_gate/meters.json

The third line trains as long without a gate, since training on a text lowers its loss in any case. meters.py prints the
loss and the sinks of the published model, of the model without a gate and of the gated one. A run of 250k tokens took
30 minutes on one busy CPU core; what it did to the model's sinks is in results/smollm2.

A Qwen3 with such a gate is a Qwen3.5 to transformers, which loads the folder gated/:

    python data/text/prepare.py book.txt --tokenizer=Qwen3-0.6B --out_dir=data/qwen3
    python train.py config/late_gate.py --init_from=Qwen3-0.6B --dataset=data/qwen3 --out_dir=out/gated_qwen
    python hub/export.py --checkpoint=out/gated_qwen --to_hf=gated --family=qwen3_5_text

Not run on Qwen's published weights: a test runs it on a random model of the same family.
"""

init_from = "out/smollm2/model.gguf"
dataset = "data/smollm2"
out_dir = "out/late_gate"

gate = "elementwise"
gate_activation = "sigmoid2"
gate_lr_scale = 10

block_size = 512
batch_size = 4
max_iters = 122
schedule = "constant"
learning_rate = 1e-4
warmup_iters = 10
eval_interval = 61
