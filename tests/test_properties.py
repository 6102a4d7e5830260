"""Any config either builds a model that trains a step and decodes, or gives one line that says why not.

python -m pytest tests/test_properties.py
"""

import configurator
from configurator import UserError

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gate import GATE_ACTIVATIONS, GRANULARITIES, POSITIONS, READOUT_ACTIVATIONS
from model import GPT, MIXERS, GPTConfig

words = st.sampled_from
term = st.builds("{}{}".format, words(GRANULARITIES), words(["", *(f"@{position}" for position in POSITIONS)]))
joined = st.builds("+".join, st.lists(st.one_of(term, st.just("native")), min_size=1, max_size=3))
layer_gate = st.one_of(words(["none", "native", "elementwise"]), joined)
configs = st.fixed_dictionaries(
    {
        "attention": st.lists(words(list(MIXERS)), min_size=1, max_size=3).map(",".join),
        "gate": st.lists(layer_gate, min_size=1, max_size=2).map(",".join),
        "n_layer": st.integers(1, 3),
        "n_head": words([1, 2, 3, 4]),
        "n_embd": words([8, 12, 16]),
        "block_size": st.integers(12, 40),
        "vocab_size": st.integers(2, 30),
    },
    optional={
        "head_dim": words([2, 3, 8]),
        "n_kv_head": words([1, 2, 3]),
        "n_groups": words([1, 2, 3]),
        "state_size": words([1, 4]),
        "expand": words([1, 2]),
        "position": words(["rope", "learned", "none"]),
        "short_conv": words([0, 1, 3]),
        "qk_norm": st.booleans(),
        "attention_softcap": words([0.5, 5.0]),
        "logit_softcap": words([0.5, 5.0]),
        "pad_vocab_to": words([1, 8]),
        "mlp_ratio": words([0.1, 1.0, 4.0]),
        "gate_activation": words(list(GATE_ACTIVATIONS)),
        "gate_rank": words([0, 2]),
        "gate_input": words(["token", "static"]),
        "gate_bias": words([-3.0, 0.0, 3.0]),
        "readout_norm": words(["published", "none", "rms", "denominator"]),
        "norm_first": st.booleans(),
        "readout_activation": words(list(READOUT_ACTIVATIONS)),
        "branch_scale": words([0.5, 1.0]),
        "out_init_scale": words([0.5, 1.0]),
        "match_params": st.booleans(),
    },
)


@given(keys=configs)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_a_config_works_or_says_why_not(keys):
    try:
        config = configurator.build(GPTConfig, keys)
        model = GPT(config)
    except UserError as error:
        event("refused")
        assert str(error) and "\n" not in str(error)
        return
    event("built")
    idx = torch.randint(config.vocab_size, (2, 11))
    loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        expected, state = model.features(idx)[0], model.init_state(2)
        first, state = model.features(idx[:, :6], state)
        second, _ = model.features(idx[:, 6:], state, start=6)
    torch.testing.assert_close(torch.cat([first, second], dim=1), expected, rtol=1e-3, atol=1e-3)
    assert model.generate(idx[:, :3], 4).shape == (2, 7)
