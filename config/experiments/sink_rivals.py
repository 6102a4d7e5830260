"""
Which rivals of the gate take over from the attention sink? Sink logits, softpick, FoX and a window, as in sink.py.

The numbers are sink.py's, about idle queries: the weight on <s>, and the effective sink, what is written of <s>. The
key of a sink's logit has weight, too, but a value of zero: it writes nothing, and is in neither number (`to_sink` has
it). Weights of softpick may sum to less than one; its weight on <s> is a share of their sum. A window of 16 hides <s>
from 48 of the 63 queries, so that it halves both numbers by construction: its claim is about the loss.

Headwise gate and sink logit are one form (docs/gates.md): are they equivalent? sink.py's two small effective sinks
(headwise, elementwise@value) differ by a spread of 0.012 a pair, and ten seeds show a band of 1.0 spreads in 80% of
cases, so that 0.02, an eighth of the excess without a gate, leaves room for a spread of 0.02.

100 runs take 164 core-minutes. The claims were written before the first run, those of the gates after sink.py's. When
these had run, XSA was added, with an exploratory claim of its own family. Its weight on <s> is a share by absolute
value, since that of a query's own value may be negative.
"""

include = "sink.py"

name = "sink_rivals"
seeds = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
arms = {
    "none": {},
    "elementwise": {"gate": "elementwise"},
    "headwise": {"gate": "headwise"},
    "elementwise@value": {"gate": "elementwise@value"},
    "sink zero": {"attention": "sink_zero"},
    "sink head": {"attention": "sink_head"},
    "sink token": {"attention": "sink_token"},
    "softpick": {"attention": "softpick"},
    "FoX": {"attention": "fox"},
    "window": {"window": "16"},
    "XSA": {"attention": "xsa"},
}
seeds_of = {}

claim_base = {
    "of": ["meters", "kinds", "other", "effective"],
    "above": -0.0049,
    "sides": 1,
    "family": "rivals",
    "family_reason": "declared before 0.5, when a claim named its family without a reason",
}
claims = {
    "instrument: without a gate the weight on <s> is over 0.5": {
        "contrast": "none",
        "above": 0.5,
        "of": ["meters", "kinds", "other", "share"],
        "family": "instrument",
    },
    "a sink of 0 halves the effective sink's excess": {"contrast": "0.5 * none - sink zero"},
    "... a head's sink logit does": {"contrast": "0.5 * none - sink head"},
    "... a token's sink logit does": {"contrast": "0.5 * none - sink token"},
    "... softpick does": {"contrast": "0.5 * none - softpick"},
    "... FoX does": {"contrast": "0.5 * none - FoX"},
    "... a headwise gate does, again": {"contrast": "0.5 * none - headwise", "family": "gates"},
    "... a gate on the values does": {
        "contrast": "0.5 * none - elementwise@value",
        "family": "gates",
    },
    "a token's sink logit and a headwise gate leave the same effective sink": {
        "contrast": "sink token - headwise",
        "within": 0.02,
        "sides": 2,
        "family": "equivalence",
    },
    "a token's sink logit halves the weight's excess": {
        "contrast": "0.5 * none - sink token",
        "above": -0.0326,
        "of": ["meters", "kinds", "other", "share"],
        "family": "weight",
    },
    "a window raises the loss": {
        "contrast": "window - none",
        "above": 0,
        "of": ["meters", "kinds", "other", "loss"],
        "family": "window",
    },
    "to a token's sink logit goes half of the weight": {
        "contrast": "sink token",
        "above": 0.5,
        "of": ["meters", "kinds", "other", "to_sink"],
        "exploratory": True,
    },
    "XSA halves the effective sink's excess": {
        "contrast": "0.5 * none - XSA",
        "family": "XSA",
        "family_reason": "declared when all others had run",
        "exploratory": True,
    },
}
