"""
Pretraining on FineWeb-Edu, 124M parameters: softmax attention with an elementwise gate behind it, GPT-2's BPE.

    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --threads=8 --out_dir=data/fineweb_edu
    torchrun --standalone --nproc_per_node=8 train.py config/pretrain/124M.py

Name hybrid.py behind it for three layers of Gated DeltaNet to one of softmax. docs/pretrain.md has tokens, memory and
hours. Result: not run.
"""

dataset = "data/fineweb_edu"
out_dir = "out/pretrain/124M"

n_layer = 12
n_head = 12
n_kv_head = 6
n_embd = 768
block_size = 1024
vocab_size = 50304  # 50,257 ids, up to a multiple of 64
mlp = "swiglu"
qk_norm = True
attention = "softmax"
gate = "elementwise"

batch_size = 16
gradient_accumulation_steps = 32  # 16 * 1024 * 32 = 524,288 tokens a step
max_iters = 19_000  # 10.0B tokens, the sample once
learning_rate = 6e-4
warmup_iters = 500
weight_decay = 0.1
eval_interval = 250
save_interval = 1000
eval_tokens = 1_000_000
eval_whole = True
