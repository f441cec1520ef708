"""The HTML around a report's charts: one file that loads nothing. Every text of a run is escaped
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1c1f24;
  --muted: #667085; --edge: #e3e6eb; --grid: #e9ecf0;
  --good: #2b8a3e; --bad: #c92a2a; --busy: #b35c00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --card: #1d2025; --text: #e8eaee;
    --muted: #9aa3b2; --edge: #30343c; --grid: #2c3038;
    --good: #69db7c; --bad: #ff8787; --busy: #ffc078; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 8px; }
.caption, .path { color: var(--muted); font-size: 13.5px; overflow-wrap: anywhere; }
.verdict { font-size: 17px; margin: 8px 0 4px; }
.state { display: inline-block; border: 1px solid currentColor; border-radius: 99px;
  padding: 0 10px; font-size: 13px; margin-right: 8px; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.busy { color: var(--busy); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 18px 0; }
.tile, section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 10px 14px; }
.tile b { display: block; font-size: 22px; font-weight: 600; }
.tile span { color: var(--muted); font-size: 13px; }
section { padding: 16px 18px; margin-top: 16px; overflow: hidden; }
.pair { display: grid; grid-template-columns: 1fr; gap: 16px; margin-top: 16px; }
.pair section { min-width: 0; margin: 0; }
@media (min-width: 900px) { .pair { grid-template-columns: 1fr 1fr; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; }
td { border-top: 1px solid var(--edge); }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
td div { white-space: pre-wrap; overflow-wrap: break-word; max-height: 180px; overflow-y: auto; }
pre, .mono td div { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12.5px; }
pre, .mono td div { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: 8px 0 0; }
details > summary { cursor: pointer; font-size: 17px; font-weight: 600; }
"""

# Charts are drawn on a transparent ground; their text and grid follow the page's colours, also when
# these change.
_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)');
function follow() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue('--' + name).trim();
  for (const chart of document.querySelectorAll('.plotly-graph-div')) {
    const update = {'font.color': colour('text'), 'hoverlabel.bgcolor': colour('card'),
      'hoverlabel.bordercolor': colour('edge'), 'hoverlabel.font.color': colour('text')};
    for (const key of Object.keys(chart.layout).filter((key) => /^[xy]axis/.test(key))) {
      update[key + '.gridcolor'] = colour('grid');
      update[key + '.linecolor'] = colour('edge');
    }
    Plotly.relayout(chart, update);
  }
}
dark.addEventListener('change', follow);
follow();
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page, with plotly.js inside it."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def chart(name: str, title: str, caption: str, figure: go.Figure | None) -> str:
    """A section with a chart, or with a line that says there is nothing to draw."""
    if figure is None:
        return section(title, '<p class="caption">This run recorded no values for this chart.</p>')
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"chart-{name}", config=config
    )
    return section(title, f'<p class="caption">{escape(caption)}</p>\n{drawn}')


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n"


def folded(title: str, body: str) -> str:
    """A section that opens on a click."""
    return f"<section><details><summary>{escape(title)}</summary>\n{body}\n</details></section>\n"


def pair(*sections: str) -> str:
    """Sections side by side where the window is wide enough."""
    return f'<div class="pair">\n{"".join(sections)}</div>\n'


def paragraph(text: str, css_class: str = "caption") -> str:
    return f'<p class="{css_class}">{escape(text)}</p>\n'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Large numbers with a small line below each: (value, what it is)."""
    inner = "".join(
        f"<div class='tile'><b>{escape(v)}</b><span>{escape(what)}</span></div>\n"
        for v, what in values
    )
    return f'<div class="tiles">\n{inner}</div>\n'


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], css_class: str = "") -> str:
    """A table of texts. Line breaks and spaces of a cell are kept; a long cell scrolls."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    lines = ("".join(f"<td><div>{escape(str(cell))}</div></td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table class="{css_class}"><tr>{head}</tr>\n{body}</table></div>\n'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>\n"
