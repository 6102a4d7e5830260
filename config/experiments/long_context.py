"""
Loss beyond the training length: a small byte-level GPT trained at 256 tokens, read at 256, 512 and 1,024.

RoPE is evaluated as it was trained, NTK-scaled, and with YaRN, both at 4 times the trained length. GLA has no positions
to scale, and cosFormer refuses positions past its M, which is block_size. Six runs of one seed take a quarter of an
hour on two CPU cores: they show the curves, and do not compare arms.

Result (results/long_context/): from 256 to 1,024 tokens, softmax as trained loses 0.16 nats a byte, and 0.20 with the
gate. With NTK scaling both lose 0.05. With YaRN they lose next to nothing, but YaRN costs 0.11 and 0.15 at 256 tokens.
GLA gains 0.01.
"""

include = "base/bytes.py"

name = "long_context"
arms = {
    "softmax": {"attention": "softmax"},
    "softmax gated": {"attention": "softmax", "gate": "elementwise"},
    "gla": {"attention": "gla"},
    "gla gated": {"attention": "gla", "gate": "elementwise"},
    "cosformer": {"attention": "cosformer"},
    "cosformer gated": {"attention": "cosformer", "gate": "elementwise"},
}

scores = {
    "as trained": {"lengths": [256, 512, 1024]},
    "NTK": {"lengths": [256, 512, 1024], "rope_scaling": "ntk", "rope_factor": 4},
    "YaRN": {"lengths": [256, 512, 1024], "rope_scaling": "yarn", "rope_factor": 4},
}

base = {"max_iters": 500, "learning_rate": 2e-3, "warmup_iters": 100, "eval_interval": 250}
