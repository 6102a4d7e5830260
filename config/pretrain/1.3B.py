"""
The same with 1.3B parameters: 24 x 2048, T = 2048, 20 tokens a parameter. See 124M.py. Result: not run.

    python data/hub/prepare.py HuggingFaceFW/fineweb-edu --config=sample-100BT --out_dir=data/fineweb_edu_100BT
    torchrun --standalone --nproc_per_node=8 train.py config/pretrain/1.3B.py
"""

include = "350M.py"

dataset = "data/fineweb_edu_100BT"
out_dir = "out/pretrain/1.3B"

n_embd = 2048

batch_size = 2
gradient_accumulation_steps = 256  # 2 * 2048 * 256 = 1,048,576 tokens a step
max_iters = 25_500  # 26.7B tokens
learning_rate = 6e-4 * 768 / n_embd
warmup_iters = 1000
