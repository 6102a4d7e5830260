"""
Do ten variants of Qiu et al. (2025, tables 1, 3 and 4) come in their published order? Softmax, in text.py's setting.

One key and value head for four query heads (theirs: 4 for 32). The published models are mixtures of experts with 15B
parameters, read by perplexity after 400B tokens: from 6.026 without a gate to 5.761 with the elementwise one. Each is
one run, and all have one learning rate; here they do, too, unless another is clearly better for an arm. Six seeds can
tell the top from the bottom, which is the one claim. How well the order agrees is a correlation with its interval.
"""

include = "base/text.py"

name = "qiu"
seeds = [20, 21, 22, 23, 24, 25]
arms = {
    "baseline": {},
    "elementwise": {"gate": "elementwise"},
    "headwise": {"gate": "headwise"},
    "shared": {"gate": "shared"},
    "value": {"gate": "elementwise@value"},
    "output": {"gate": "elementwise@output"},
    "RMSNorm": {"readout_norm": "rms"},
    "SiLU": {"readout_activation": "silu"},
    "static": {"gate": "elementwise", "gate_input": "static"},
    "non-sparse": {"gate": "elementwise", "gate_activation": "non_sparse"},
}

claims = {
    "the published top is lower than the published bottom": {
        "contrast": "1/3 * baseline + 1/3 * output + 1/3 * SiLU - 1/3 * elementwise - 1/3 * headwise - 1/3 * shared",
        "above": 0,
        "sides": 1,
    },
}

# log(6.026 / perplexity): gains over the baseline in nats a token
ranks = {
    "the published order": {
        "baseline": 0.0,
        "output": 0.0015,
        "SiLU": 0.0085,
        "static": 0.0183,
        "non-sparse": 0.0211,
        "RMSNorm": 0.0302,
        "value": 0.0348,
        "shared": 0.0381,
        "headwise": 0.0396,
        "elementwise": 0.0450,
    },
}

base = {"n_kv_head": 1}
