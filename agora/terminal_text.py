"""Makes text that others wrote harmless to a terminal, or one line.

Knows: which characters a terminal shows. Must not know: who wrote a text, or where it is printed. Every command prints
through it (cli/console.py), and so does the log (observe/log.py).
"""

from __future__ import annotations

from typing import Final

HIDDEN: Final = "?"


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns `text` with HIDDEN in place of each character that a terminal would obey instead of showing.

    Those are control characters (escape sequences begin with one) and characters that change the direction or the
    order of what is shown. keep: characters that stay although they are not shown.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else HIDDEN for sign in text)


def one_line(text: str, limit: int | None = None) -> str:
    """Returns `text` with each run of whitespace replaced by one space, cut to its first `limit` characters."""
    return " ".join(text.split())[:limit]
