"""docs/walkthrough.md is true: its blocks run one after the other, and each prints what stands behind it."""

import re
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAGE = Path(__file__).resolve().parents[1] / "docs" / "walkthrough.md"
STEPS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
DECIMALS = re.compile(r"\d+\.(\d+)")


def test_each_step_of_the_walkthrough_prints_what_stands_there(capsys):
    assert len(STEPS) == 7 and sum(code.count("\n") for code, _ in STEPS[:6]) <= 175
    plt.close("all")  # figures of other tests
    names = {}
    for code, shown in STEPS:
        exec(code, names)
        printed = capsys.readouterr().out
        assert DECIMALS.sub("#", printed) == DECIMALS.sub("#", shown)
        for ours, theirs in zip(DECIMALS.finditer(printed), DECIMALS.finditer(shown), strict=True):
            # another CPU rounds otherwise, which training makes larger
            assert float(ours[0]) == pytest.approx(float(theirs[0]), abs=2.01 * 10 ** -len(theirs[1])), printed
    (axes,) = plt.gcf().axes  # the last block trains models of model.py, and plots in place
    assert [len(line.get_ydata()) for line in axes.lines] == [100, 100]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["gate none", "gate headwise"]
    plt.close()
