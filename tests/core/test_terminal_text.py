"""Text that others wrote: made one line."""

from __future__ import annotations

from agora.core.terminal_text import one_line


def test_text_in_one_line_has_single_spaces_and_no_more_than_its_limit() -> None:
    assert one_line(" two\n\n words\t ") == "two words"
    assert one_line("two words", 5) == "two w"
