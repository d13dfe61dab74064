"""HTML by construction: a text becomes markup only through `element`, which escapes it."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

VOID = frozenset({"input", "link", "meta"})  #: elements without content


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: str | int | float | bool | None) -> Html:
    """An element; texts that are not `Html` are escaped. `class_` is class, `data_n` data-n; None adds nothing."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in VOID else f"{start}{join(content)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> Html:
    """A table in a box that scrolls sideways, also by keyboard. The first cell of a row is its heading."""
    classes = ["n" if at in numeric else "" for at in range(len(head))]
    names = [element("th", name, scope="col", class_=each or None) for name, each in zip(head, classes)]
    body = [element("tr", *map(_cell, row, head, classes, range(len(row)))) for row in rows]
    inner = element(
        "table", element("caption", caption), element("thead", element("tr", *names)), element("tbody", *body)
    )
    return element("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _cell(text: str, name: str, kind: str, at: int) -> Html:
    if not at:
        return element("th", text, scope="row")
    return element("td", text, class_=f"{kind} none".strip() if text == "-" else kind or None, data_name=name)


def packed_json(value: Any) -> Html:
    """JSON as gzip in base64, which ends no script element; browsers unpack it by themselves."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())
