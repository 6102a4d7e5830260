"""
Recall beyond the training length: MQAR trained at 64 tokens and 4 pairs, scored at up to 1,024 tokens and 64 pairs.

Every mixer has a short convolution of width 4, with which it can solve the task it is trained on. block_size is 1,024,
cosFormer's M: it refuses longer rows. Twenty runs take about an hour on two CPU cores.

Result (two seeds, results/mqar_length/): with 4 pairs all mixers but mamba2 keep at least 86% up to 1,024 tokens. With
64 pairs softmax keeps 58%, gla 23%, gated_deltanet 21%, cosformer 14%, mamba2 5%; with the gate they keep 38, 19, 15,
14 and 6%. In seed 1 the two mamba2 runs had reached only 48 and 57% on the task they were trained on.
"""

name = "mqar_length"
arms = {
    "softmax": {"attention": "softmax"},
    "softmax gated": {"attention": "softmax", "gate": "elementwise"},
    "cosformer": {"attention": "cosformer"},
    "cosformer gated": {"attention": "cosformer", "gate": "elementwise"},
    "gla": {"attention": "gla"},
    "gla gated": {"attention": "gla", "gate": "elementwise"},
    "mamba2": {"attention": "mamba2"},
    "mamba2 gated": {"attention": "mamba2", "gate": "elementwise"},
    "gated_deltanet": {"attention": "gated_deltanet"},
    "gated_deltanet gated": {"attention": "gated_deltanet", "gate": "elementwise"},
}
seeds = [0, 1]

prepare = "mqar"
data = {"seq_len": 64, "pairs": 4, "vocab_size": 256, "train_size": 100_000, "val_size": 1_000}
scores = {"longer": {"batch_size": 16, "block_size": 1024}}
score_data = {
    "slices": "64/4,128/4,256/4,512/4,1024/4,128/8,256/16,512/32,1024/64",
    "vocab_size": 256,
    "train_size": 1,
    "val_size": 300,
}

base = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "mlp_ratio": 2,
    "block_size": 1024,
    "short_conv": 4,
    "state_size": 32,
    "batch_size": 64,
    "max_iters": 2000,
    "learning_rate": 3e-3,
    "warmup_iters": 50,
    "eval_interval": 500,
    "eval_batch_size": 250,
    "device": "cpu",
    "dtype": "float32",
}
