"""A report as a list of blocks, written out as markdown for Prefect or as one HTML page.

Prefect's UI shows markdown tables and PNG data URIs, and strips inline SVG, so pictures are PNGs.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    text: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """`rows` are as long as `columns`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return f"data:image/png;base64,{b64encode(self.png).decode()}"


Block = Heading | Paragraph | Table | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def to_html(blocks: Sequence[Block], *, title: str) -> str:
    """A page that needs no other file."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}"
    "td,th{border:1px solid #bbb;padding:.25rem .6rem;text-align:left}"
    "img{max-width:100%}"
)


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_one_line(block.text)}"
        case Paragraph():
            return block.text
        case Picture():
            return f"![{_one_line(block.title)}]({block.data_uri})"
        case Table():
            lines = [block.columns, ("---",) * len(block.columns), *block.rows]
            return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p>{html.escape(block.text)}</p>"
        case Picture():
            return f'<img alt="{html.escape(block.title)}" src="{block.data_uri}">'
        case Table():
            head = "".join(f"<th>{html.escape(column)}</th>" for column in block.columns)
            rows = "".join(
                f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
                for row in block.rows
            )
            return f"<table><tr>{head}</tr>{rows}</table>"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return html.escape(_one_line(text), quote=False).replace("|", "\\|")
