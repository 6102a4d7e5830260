"""
The same with 350M parameters: 24 x 1024, T = 2048, 20 tokens a parameter. See 124M.py. Result: not run.

    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-10BT --threads=8 --out_dir=data/fineweb_edu
    torchrun --standalone --nproc_per_node=8 train.py config/pretrain/350M.py
"""

include = "124M.py"

out_dir = "out/pretrain/350M"

n_layer = 24
n_head = 16
n_kv_head = 8
n_embd = 1024
block_size = 2048
mlp_ratio = 4.125  # 2,816 channels

batch_size = 8  # 8 * 2048 * 32 = 524,288 tokens a step
max_iters = 13_750  # 7.2B tokens
learning_rate = 6e-4 * 768 / n_embd
