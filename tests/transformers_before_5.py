"""What a transformers before 5 makes of folders that hub/export.py has written; test_huggingface.py runs this.

    PYTHONPATH=.venv/transformers4 python tests/transformers_before_5.py FOLDER TEXTS.json

Writes FOLDER/*/logits.pt, the logits of IDX, and FOLDER/*/ids.json, the ids of the texts, of each folder in FOLDER.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

IDX = torch.arange(2 * 64).view(2, 64) * 37 % 299


@torch.no_grad()
def main(folder: Path, texts: list[str]) -> None:
    assert transformers.__version__ < "5"
    for written in sorted(folder.iterdir()):
        model = transformers.AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager")
        torch.save(model.eval()(IDX).logits, written / "logits.pt")
        tokenizer = transformers.AutoTokenizer.from_pretrained(written)
        ids = [tokenizer(text)["input_ids"] for text in texts]
        (written / "ids.json").write_text(json.dumps([len(tokenizer), ids]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
