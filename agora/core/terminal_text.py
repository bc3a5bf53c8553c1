"""Makes text that others wrote harmless to a terminal, or one line.

Every command prints through this module (cli/console.py), and so does the log (observe/log.py).
"""

from __future__ import annotations

from typing import Final

HIDDEN: Final = "?"


def printable(text: str, keep: str = "\n\t") -> str:
    """Returns `text` with HIDDEN in place of each character that str.isprintable rejects, except those in `keep`.

    Rejected are control characters (escape sequences begin with one), characters that change the direction or the order
    of what is shown, unassigned ones, and every kind of space except " ".
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in keep else HIDDEN for sign in text)


def one_line(text: str, limit: int | None = None) -> str:
    """Returns `text` with each sequence of whitespace replaced by one space, and none at the ends.

    limit: maximum number of characters, beyond which the text is cut; None for no limit.
    """
    return " ".join(text.split())[:limit]
