"""A gate for a trained model starts at the same function, and trains at a rate of its own."""

import pytest
import torch
from small_models import off_its_start
from test_edited_meters import GatedMLP

import train
from base import configurator
from gate import GATE_ACTIVATIONS
from model import MIXERS, MLPS, GPTConfig
from runs import checkpoint as checkpoints
from runs import resume

GATE = "elementwise+headwise@value+elementwise@query+elementwise@output"
CASES = [  # keys of the model, and of its new gates
    *((dict(attention=name), {}) for name in MIXERS),
    (dict(norm="layer", bias=True, mlp="gelu_tanh", position="learned"), {}),
    ({}, dict(gate_activation="add_silu", gate_input="static")),
    ({}, dict(gate_activation="identity", gate_input="static", gate_bias=1.0)),
    ({}, dict(gate_activation="add_tanh")),
]


@pytest.mark.parametrize(("keys", "gates"), CASES, ids=str)
def test_a_gate_added_to_any_mixer_starts_at_exactly_the_same_function(keys, gates, helpers, tmp_path, monkeypatch):
    monkeypatch.setitem(GATE_ACTIVATIONS, "add_tanh", lambda y, g, slope: y + g.tanh())  # an edit
    sizes = dict(n_layer=2, n_embd=16, n_head=2, block_size=32, vocab_size=20, state_size=4, short_conv=3)
    model = off_its_start(GPTConfig(**sizes, rope_base=500, **keys), torch.float32, noise=0.2)
    checkpoints.save(tmp_path / "ckpt.pt", {"model": model.state_dict(), "model_args": vars(model.config)})
    gates = dict(gate=GATE, gate_activation="sigmoid2") | gates
    words = helpers.words(init_from=tmp_path, out_dir=tmp_path / "out", **gates)
    config, _, resumed, source, notes = resume.where_to_start(configurator.read_words(train.TrainConfig, words))
    gated, _ = train.make_model(config, resumed, source)
    new = gated.state_dict().keys() - source["model"].keys()
    assert new and all(".gates." in name for name in new) and source["model"].keys() <= gated.state_dict().keys()
    assert notes[0] == f"gate: {GATE}, where {tmp_path} has none"
    idx = torch.randint(20, (3, 32))
    for is_bfloat16 in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            assert torch.equal(gated.eval()(idx), model(idx))


def test_a_new_gate_that_is_not_the_identity_is_refused_and_so_is_another_tokenizer(
    run, trained, text, helpers, monkeypatch
):
    for start, keys in [
        (0.5, dict(gate="elementwise")),
        (0.75, dict(gate="headwise@value", gate_activation="non_sparse")),
        (0, dict(gate="elementwise", gate_activation="silu")),
        (0, dict(gate="elementwise", gate_input="static", gate_activation="identity")),
        (0.5, dict(attention="gated")),
    ]:
        message = helpers.error_of(run, "gated", init_from=trained, max_iters=1, **keys)
        assert f"a new gate would start at {start}, not 1, and change what {trained} computes" in message
    monkeypatch.setitem(MLPS, "gated", GatedMLP)
    message = helpers.error_of(run, "gated", init_from=trained, max_iters=1, mlp="gated")
    assert f"gate mlp.gate: a new gate would start at 0.5, not 1, and change what {trained} computes" in message
    message = helpers.error_of(run, "out", init_from=trained, dataset=text, max_iters=1)
    assert "its tokenizer is 'byte', the model was trained with" in message


def test_a_gate_that_is_there_is_neither_changed_nor_lost_to_a_new_one(run, helpers, capsys):
    gated = run("gated", gate="elementwise", gate_bias=1.0)
    native = run("native", attention="gla", gate="native")
    identity = dict(gate_activation="sigmoid2", max_iters=1, eval_interval=1)
    message = helpers.error_of(run, "other", init_from=gated, **identity)
    assert message == f"gate_activation='sigmoid2': would change the gates that {gated} has: 'sigmoid'"
    message = helpers.error_of(run, "other", init_from=native, attention="gla", gate="elementwise", **identity)
    assert "has a trained gate (blocks.0.mixer.gates.native." in message and "would be lost to a new one" in message
    both = run("both", init_from=native, attention="gla", gate="native+elementwise", **identity)
    first, last = helpers.metrics(both, "eval")[0], helpers.metrics(native, "eval")[-1]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    # to take a gate or its bias away is plain to see; to add the bias is refused
    without = run("without", init_from=gated, gate_bias="none", max_iters=1)
    assert "left out: blocks.0.mixer.gates.readout.proj.bias" in capsys.readouterr().out
    message = helpers.error_of(run, "other", init_from=without, gate_bias=3.0, max_iters=1)
    assert f"a new gate would start at 0.953, not 1, and change what {without} computes" in message
    without = run("no gate", init_from=gated, gate="none", max_iters=1)
    assert not any("gates" in name for name in checkpoints.load(without)["model"])


def test_a_run_from_weights_has_their_keys_of_the_model_unless_given(trained, mqar, helpers, tmp_path, capsys):
    words = dict(dataset=mqar, out_dir=tmp_path / "out", init_from=trained, max_iters=1, device="cpu", threads=1)
    train.main(helpers.words(**words, rope_base=500.0, dtype="float32"))
    said, args = capsys.readouterr().out, checkpoints.load(tmp_path / "out")["model_args"]
    assert [args[name] for name in ("n_layer", "n_embd", "block_size")] == [2, 16, 32]
    assert f"rope_base: 500.0, where {trained} has 10000.0\n" in said and "14 of 14 tensors taken" in said
    words |= dict(out_dir=tmp_path / "longer", block_size=64, rope_scaling="yarn", rope_factor=2)
    train.main(helpers.words(**words))
    assert checkpoints.load(tmp_path / "longer")["model_args"]["rope_length"] == 32  # that of the weights


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gates_alone_are_trained_and_a_resumed_run_goes_on_so(run, trained, helpers, optimizer):
    keys = dict(gate="elementwise", gate_activation="sigmoid2", gates_only=True, schedule="constant")
    keys |= dict(init_from=trained, optimizer=optimizer)
    whole, parts = run("whole", max_iters=6, **keys), run("parts", max_iters=4, **keys)
    train.main(helpers.words(out_dir=parts, init_from="resume", max_iters=6))
    start, end, again = (checkpoints.load(out)["model"] for out in (trained, whole, parts))
    assert all(torch.equal(end[name], again[name]) for name in end)
    changed = {name for name in end if name not in start or not torch.equal(start[name], end[name])}
    assert changed == {f"blocks.{i}.mixer.gates.readout.proj.weight" for i in (0, 1)}
    message = helpers.error_of(run, "none", init_from=trained, gates_only=True, max_iters=1)
    assert message == "gates_only=True: no layer has a gate; name one, as in --gate=headwise"
    message = helpers.error_of(run, "native", gate="native", gates_only=True, max_iters=1)  # of softmax, which has none
    assert message == "gates_only=True: no layer has a gate; name one, as in --gate=headwise"


def test_a_new_gate_has_a_learning_rate_of_its_own_which_a_resumed_run_keeps(run, trained, helpers):
    gate = dict(
        init_from=trained, gate="elementwise", gate_activation="sigmoid2", gate_lr_scale=10.0, schedule="constant"
    )
    whole = run("whole", max_iters=6, **gate)
    parts = run("parts", max_iters=4, **gate)
    gates = {f"blocks.{i}.mixer.gates.readout.proj.weight" for i in (0, 1)}

    def scales(out):
        saved = checkpoints.load(out)
        return {name: g["lr_scale"] for g in saved["optimizer"]["param_groups"] for name in g["param_names"]}

    assert {name: scale for name, scale in scales(whole).items() if scale != 1} == dict.fromkeys(gates, 10.0)
    muon = run("muon", max_iters=1, optimizer="muon", muon_lr_scale=3.0, **gate)
    assert {scales(muon)[name] for name in gates} == {30.0}
    still = checkpoints.load(run("still", max_iters=4, **gate | {"gate_lr_scale": 1e-30}))["model"]
    assert max(still[name].abs().max() for name in gates) < 1e-20
    train.main(helpers.words(out_dir=parts, init_from="resume", max_iters=6))
    assert scales(parts) == scales(whole)
    a, b = (checkpoints.load(out) for out in (whole, parts))
    assert helpers.equal(a["model"], b["model"]) and helpers.equal(a["optimizer"], b["optimizer"])
