"""
Do rivals of the gate lower the loss where it does? Sink logits, softpick and FoX in softmax layers, on clean text.

4 layers x 128, 256 tokens, 3,000 steps of 2,048 bytes, bfloat16. horizon.py's rows cannot serve: its runs, of 1,500 and
6,000 steps, have other schedules, so that no gate and the sigmoid gate run here again. Rates of three arms are chosen
at 500 steps, from four, two of them over the 3e-3 that horizon.py chose: a look at what rates an arm tolerates. The
other arms take the rate of the nearest one. FoX has no RoPE, as published. A gain is a loss without minus a loss with,
in nats a byte.

Five seeds decide one one-sided claim, if all five agree; the rest is a look, with three seeds in four of the arms. Text
shows no sink at this size (results/README.md): none of it is about one. 51 runs, 24 of them to choose rates, take 224
core-minutes. The claim was written before the first run. XSA and its exploratory claim, a family of its own, were added
when these had run: three seeds, for a look.
"""

include = "base/clean.py"

name = "rivals_on_text"
seeds = [71, 72, 73, 74, 75]
arms = {
    "none": {},
    "sigmoid": {"gate": "elementwise"},
    "headwise": {"gate": "headwise"},
    "sink head": {"attention": "sink_head"},
    "sink token": {"attention": "sink_token"},
    "softpick": {"attention": "softpick"},
    "FoX": {"attention": "fox", "position": "none"},
    "XSA": {"attention": "xsa"},
}
seeds_of = {
    "headwise": [71, 72, 73],
    "sink head": [71, 72, 73],
    "softpick": [71, 72, 73],
    "FoX": [71, 72, 73],
    "XSA": [71, 72, 73],
}
first_arms = ["none", "sigmoid", "sink token"]

learning_rates = [1.5e-3, 3e-3, 6e-3, 1.2e-2]
selection_seeds = [340, 341]
selection_iters = 500
pool_rates = True
rate_of = {
    "headwise": "sigmoid",
    "sink head": "sink token",
    "softpick": "none",
    "FoX": "none",
    "XSA": "none",
}

claim_base = {
    "above": 0,
    "sides": 1,
    "exploratory": True,
    "family_reason": "declared before 0.5, when the claims about one number were a family",
}
claims = {
    "a token's sink logit lowers the loss": {"contrast": "none - sink token", "exploratory": False},
    "the sigmoid gate does": {"contrast": "none - sigmoid"},
    "a headwise gate does": {"contrast": "none - headwise"},
    "a head's sink logit does": {"contrast": "none - sink head"},
    "softpick does": {"contrast": "none - softpick"},
    "FoX does": {"contrast": "none - FoX"},
    "a token's sink logit lowers the largest activation": {
        "contrast": "none - sink token",
        "of": ["log", "meters", "max_activation"],
        "family": "largest activation",
    },
    "the sigmoid gate lowers the largest activation": {
        "contrast": "none - sigmoid",
        "of": ["log", "meters", "max_activation"],
        "family": "largest activation",
    },
    "XSA lowers the loss": {
        "contrast": "none - XSA",
        "family": "XSA",
        "family_reason": "declared when all others had run",
    },
}

base = {"max_iters": 3000, "dtype": "bfloat16"}
