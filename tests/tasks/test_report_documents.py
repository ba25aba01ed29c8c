"""A report says the same as markdown and as a page, whatever text is in it."""

from __future__ import annotations

from html.parser import HTMLParser

from tasks.documents import Heading, Paragraph, Picture, Table, to_html, to_markdown

BLOCKS = (
    Heading(text="Nodes"),
    Paragraph(text="All is well."),
    Table(columns=("a", "b"), rows=(("x|y", "two\nlines"), ("<b>&", "–"))),
    Picture(title="Loss", png=b"\x89PNG"),
)


def test_a_table_stays_a_table_whatever_its_cells_hold() -> None:
    markdown = to_markdown(BLOCKS)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert rows == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | two lines |",
        "| &lt;b&gt;&amp; | – |",
    ]


def test_a_picture_is_within_the_document() -> None:
    assert "![Loss](data:image/png;base64,iVBORw==)" in to_markdown(BLOCKS)


def test_a_page_is_whole_and_needs_no_other_file() -> None:
    page = to_html(BLOCKS, title="a <title>")
    assert "<title>a &lt;title&gt;</title>" in page
    assert "<td>&lt;b&gt;&amp;</td>" in page
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            assert all(not (value or "").startswith("http") for _, value in attrs)

    Reader().feed(page)
    assert seen.count("tr") == 3
    assert "link" not in seen
    assert "script" not in seen
