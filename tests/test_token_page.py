"""The page that shows a text token by token: its numbers, its size, and (slow) what a browser makes of it."""

import base64
import json
import re
import shutil
import statistics

import edits
import numpy as np
import pytest

import meters
import plot
from model import MIXERS
from study import token_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def made(out, *words, **of_meters):
    """The page of a run that has one, what meters.json says, and the page's data."""
    keys = dict(checkpoint=out, rows=1, device="cpu", threads=1) | of_meters
    meters.main([f"--{name}={value}" for name, value in keys.items()])
    plot.main([str(out), "--html=true", *words])
    page = (out / "page.html").read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    return page, json.loads((out / "meters.json").read_text())["checkpoints"][-1], json.loads(data)


def triangles(data, layer):
    """(H, T, T): the weights that the page holds of a layer."""
    heads, n = len(data["layers"][layer]["writes"]), len(data["tokens"])
    units = np.frombuffer(base64.b64decode(data["layers"][layer]["weights"]), "<i2").reshape(heads, -1)
    weights = np.zeros((heads, n, n))
    weights[(slice(None), *np.tril_indices(n))] = units * token_page.UNIT
    return weights


@pytest.mark.parametrize("n_head", [1, 2])
def test_its_numbers_are_those_of_meters_json(n_head, text, helpers, tmp_path):
    keys = dict(attention="softmax,gla", gate="elementwise+elementwise@output", n_head=n_head)
    out = helpers.train(text, tmp_path, **keys)
    _, measured, data = made(out, map=f"1.{n_head - 1}")
    assert data["meters"] == {name: value for name, value in measured.items() if name != "maps"}
    for of_tokens, layer in zip(data["layers"], measured["layers"], strict=True):
        expected = {"share": layer["sink"]["share"], "effective": layer["sink"]["effective"]}
        for name, heads in expected.items():
            assert [statistics.fmean(head[1:]) for head in of_tokens[name]] == pytest.approx(heads, rel=2e-3), name
        gates = [statistics.fmean(head) for head in of_tokens["gate"]]
        assert gates == pytest.approx(layer["gates"]["readout"]["mean"], rel=2e-3)
        if n_head == 1:
            assert statistics.fmean(of_tokens["writes"][0]) == pytest.approx(layer["branch"], rel=2e-3)
    for shown in measured["maps"]:
        weights = np.array(shown["weights"])
        if shown["layer"] == 1:
            weights /= np.abs(weights).sum(1, keepdims=True)
        np.testing.assert_allclose(triangles(data, shown["layer"])[shown["head"]], weights, rtol=1e-3, atol=2e-5)
        assert data["layers"][shown["layer"]]["gate"][shown["head"]] == shown["gate"]


def test_a_text_of_ones_own_is_shown_as_text_and_the_page_is_one_small_file(text, helpers, tmp_path):
    out = helpers.train(text, tmp_path, n_layer=12, n_head=12, n_embd=24, block_size=160, gate="headwise", max_iters=1)
    page, _, data = made(out, "--text=</script>ö" + 200 * "a")
    assert 100 <= len(data["tokens"]) < 160 and 2_500_000 < len(page) < 3_000_000
    assert "".join(data["tokens"]).startswith(r"</script>\xc3\xb6aaa")
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody asks for
    assert not re.search(r"https?:|src=|href|url\(|@import|fetch\(", page)


def policy_of(page):
    """{directive: its sources}"""
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" *content="(.*?)">', page, re.S)
    return {words[0]: words[1:] for words in map(str.split, policy.split(";"))}


def test_the_page_runs_and_loads_nothing_but_what_its_template_has(trained, tmp_path):
    page, _, _ = made(shutil.copytree(trained, tmp_path / "out"))
    policy = policy_of(page)
    (nonce,) = re.findall('<script nonce="([0-9a-f]{32})">', page)
    assert policy["default-src"] == ["'none'"] and policy["script-src"] == policy["style-src"] == [f"'nonce-{nonce}'"]
    assert nonce not in made(tmp_path / "out")[0]  # another one in every page
    template = token_page.TEMPLATE.read_text()
    assert not re.search(
        r"(inner|outer)HTML|insertAdjacent|document\.write|eval\(|Function\(| style=| on\w+=", template
    )


@pytest.mark.parametrize("attention, gate", [("softmax", "none"), ("longconv", "headwise"), ("longconv", "none")])
def test_what_a_model_lacks_is_left_out(attention, gate, mqar, helpers, tmp_path, monkeypatch):
    monkeypatch.setitem(MIXERS, "longconv", edits.LongConv)
    out = helpers.train(mqar, tmp_path, attention=attention, gate=gate)
    _, _, data = made(out)
    assert len(data["tokens"]) == 32 and not data["is_text"] and all(map(str.isdigit, data["tokens"]))
    for layer in data["layers"]:
        assert (layer["gate"] is None) == (gate == "none") and len(layer["writes"][0]) == 32
        assert (layer["weights"] is None) == (layer["share"] is None) == (attention == "longconv")
    assert "stand for no text" in helpers.error_of(plot.main, [str(out), "--html=true", "--text=a"])
    helpers.train(mqar, out, attention=attention, gate=gate, init_from="resume", max_iters=12)
    assert "run meters.py again" in helpers.error_of(plot.main, [str(out), "--html=true"])
    (out / "meters.json").unlink()
    assert "run python meters.py" in helpers.error_of(plot.main, [str(out), "--html=true"])


def opened(driver, browser, file, size):
    """The file in a browser, what its console reports, and the addresses that it asks for."""
    problems, asked = [], []
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    page = driver.chromium.launch(executable_path=browser, args=flags).new_page(viewport=size)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    return page, problems, asked


def with_browser():
    """(playwright's module, a browser); the test is skipped where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not (browser := next(filter(None, map(shutil.which, BROWSERS)), None)):
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    return playwright, browser


CODE = '<img src=x onerror="document.title = 1"><script>document.title = 2</script>'


def with_code(value):
    """The same, with code in the place of each text, and behind each whole number that the page only shows."""
    if isinstance(value, dict):
        kept = {name: value[name] for name in ("checkpoint", "folder", "split", "dtype", "layers") if name in value}
        return {name: with_code(inner) for name, inner in value.items()} | kept
    return CODE if isinstance(value, str) or type(value) is int else value


@pytest.mark.slow
def test_code_in_meters_json_is_shown_as_text_and_never_run(text, helpers, tmp_path):
    playwright, browser = with_browser()
    out = helpers.train(text, tmp_path, gate="headwise")
    made(out)
    file = out / "meters.json"
    (measured,) = json.loads(file.read_text())["checkpoints"]
    evil = with_code(measured) | {"step": measured["step"]}
    for layer in evil["layers"]:
        layer["mixer"] = CODE
        layer["gates"] = {CODE: layer["gates"]["readout"]}
    file.write_text(json.dumps({"checkpoints": [evil]}))
    page_file = token_page.write_page(out)
    with playwright.sync_playwright() as driver:
        page, problems, asked = opened(driver, browser, page_file, {"width": 900, "height": 800})
        assert CODE in page.inner_text("#means h2") and CODE in page.inner_text("#gate h2")
        assert CODE in page.inner_text("#layer option >> nth=0") and CODE in page.inner_text("#about")
        assert page.eval_on_selector_all("img, #about *, h2 *, option *", "all => all.length") == 0
        assert problems == [] and len(asked) == 1
        page.evaluate("code => { document.body.innerHTML += code; }", CODE)  # and if it got in, it would not run
        page.wait_for_timeout(200)
        assert page.title() == "Token by token"
        assert len(problems) >= 2 and all("Content Security Policy" in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 380])
def test_a_browser_shows_it_and_keys_and_choices_change_what_it_shows(width, text, helpers, tmp_path):
    playwright, browser = with_browser()
    out = helpers.train(text, tmp_path, gate="headwise")
    _, measured, data = made(out)
    with playwright.sync_playwright() as driver:
        size = {"width": width, "height": 800}
        page, problems, asked = opened(driver, browser, f"{out / 'page.html'}#0.1.5", size)

        def colours():
            return page.eval_on_selector_all("#text span", "all => all.map(one => one.style.backgroundColor)")

        seen = [colours()]
        assert len(seen[0]) == len(data["tokens"]) and page.inner_text("#token h2").startswith("Token 5: ")
        mean = measured["layers"][0]["gates"]["readout"]["mean"][1]
        assert float(page.inner_text("#means dd >> nth=0")) == pytest.approx(mean, rel=6e-3)  # three digits
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#token h2").startswith("Token 6: ") and page.url.endswith("#0.1.6")
        page.keyboard.press("ArrowUp")
        assert page.url.endswith("#0.0.6")
        seen.append(colours())
        page.select_option("#layer", "1")
        seen.append(colours())
        page.hover("#text span >> nth=3")
        assert page.url.endswith("#1.0.3") and len(set(map(tuple, seen))) == 3
        weight = triangles(data, 1)[0, 3, :4].max()
        shown = page.inner_text("#row dd >> nth=0")
        assert float(shown.rstrip("%")) == pytest.approx(100 * weight, rel=6e-3)
        page.select_option("#by", "entropy")
        page.click("#heads rect >> nth=3")
        assert page.url.endswith("#1.1.3") and "layer 1, head 1: " in page.inner_html("#heads rect >> nth=3")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert problems == [] and len(asked) == 1  # the file itself
        page.goto("about:blank")
        page.goto(f"file://{out / 'page.html'}")  # at the head that copies most
        scores = [(score, i, head) for i in (0, 1) for head, score in enumerate(measured["layers"][i]["induction"])]
        _, i, head = max(scores)
        assert page.url.endswith(f"#{i}.{head}.{len(data['tokens']) - 1}")
