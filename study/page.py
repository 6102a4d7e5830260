"""A page of HTML that needs no other file, made of texts, tables and figures."""

import base64
import html
from collections.abc import Iterable
from pathlib import Path

from base.files import check_output, write_text
from study.table import Table

# its policy lets a browser load nothing and run nothing that a name or a text might have brought in
PAGE = """<!doctype html>
<!-- written by experiment.py -->
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; display: block; margin: 1rem 0 }}
p {{ max-width: 44rem; overflow-wrap: anywhere }} li {{ margin: .3rem 0 }} ul {{ padding-left: 1.2rem }}
pre {{ margin: 1.2rem 0; font-size: 12px; overflow-x: auto }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_page(path: Path, parts: Iterable[str | list[str] | Table | Path]) -> Path:
    """Writes texts, lists of lines, tables and figures as one page, which holds each image itself, and not a link.
    Returns the path."""
    check_output(path, "report")
    body = []
    for part in parts:
        if isinstance(part, Path):
            image = base64.b64encode(part.read_bytes()).decode()
            body.append(f'<img alt="{html.escape(part.stem)}" src="data:image/png;base64,{image}">')
        elif isinstance(part, Table):
            body.append(f"<pre>{html.escape(str(part))}</pre>")
        elif isinstance(part, list):
            items = [f"<li>{html.escape(item)}</li>" for item in part]
            body.append(f"<ul>{''.join(items)}</ul>")
        else:  # its lines are as long as the window is wide
            body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in part.split("\n\n")]
    title = html.escape(path.parent.resolve().name)
    write_text(path, PAGE.format(title=title, body="\n".join(body)))
    return path
