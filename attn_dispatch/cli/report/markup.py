"""HTML by construction: a text becomes markup only through `element`, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable

from attn_dispatch.cli.tables import Table


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: str | int | bool | None) -> Html:
    """An element; texts that are not `Html` are escaped. `class_` is class, `data_n` data-n; None adds nothing."""
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in ("link", "meta") else f"{start}{join(content)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(made: Table) -> Html:
    """A table in a box that scrolls, also by keyboard. A row's first cell names it."""
    if not made.rows:
        return element("p", made.nothing)
    kinds = [None if at in made.left else "n" for at in range(len(made.head))]
    head = [element("th", name, scope="col", class_=kind) for name, kind in zip(made.head, kinds)]
    rows = [
        element("tr", element("th", row[0], scope="row"), *map(_cell, row[1:], made.head[1:], kinds[1:]))
        for row in made.rows
    ]
    inner = [element("caption", made.caption), element("thead", element("tr", *head)), element("tbody", *rows)]
    return element("div", element("table", *inner), class_="scroll", role="region", aria_label=made.caption, tabindex=0)


def _cell(text: str, name: str, kind: str | None) -> Html:
    return element("td", text, class_=f"{kind or ''} none".strip() if text == "-" else kind, data_name=name)
