"""The page around a report's plots: one self-contained HTML file, light and dark, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--panel:#fff;--ink:#1b212b;--muted:#5b6675;--rule:#dde1e7;
--s1:#1f66d1;--s2:#c4570b;--s3:#1f7a4d;--s4:#7a3fc4;--heat:#0b4fa8;--bar:#6d9de3;--good:#1f7a4d;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--panel:#1c2128;--ink:#e6e9ee;--muted:#9aa5b4;
--rule:#333b46;--s1:#6ea8ff;--s2:#f2a15f;--s3:#62c894;--s4:#c09bf2;--heat:#7db4ff;--bar:#4a78b8;--good:#62c894;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.25rem;margin:2.6rem 0 .4rem}
p{max-width:75ch;margin:.5rem 0}
.sub{color:var(--muted);margin:0 0 1.2rem;max-width:none}
.short{background:var(--panel);border:1px solid var(--rule);border-left:4px solid var(--s1);border-radius:8px;
padding:.8rem 1.1rem;margin:1rem 0}
.short ul{margin:.2rem 0;padding-left:1.2rem}.short li{margin:.25rem 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:18px;margin:1rem 0}
figure{margin:0;background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:14px 16px}
figure h3{font-size:1rem;line-height:1.35;margin:0 0 .5rem}
figcaption{color:var(--muted);font-size:.875rem;margin-top:.4rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--muted);font-size:12px}svg text.axis{fill:var(--ink)}
.grid{stroke:var(--rule)}.hit{fill:transparent}.cell{fill:var(--heat)}.bar{fill:var(--bar)}
.mark{stroke:var(--s2);stroke-width:2.5}
.line{fill:none;stroke-width:2}.line.dashed{stroke-dasharray:5 4;stroke-width:1.5}
.l1{stroke:var(--s1)}.l2{stroke:var(--s2)}.l3{stroke:var(--s3)}.l4{stroke:var(--s4)}
.d1{fill:var(--s1)}.d2{fill:var(--s2)}.d3{fill:var(--s3)}.d4{fill:var(--s4)}
.band{fill-opacity:.13}.b1{fill:var(--s1)}.b2{fill:var(--s2)}.b3{fill:var(--s3)}.b4{fill:var(--s4)}
g:hover>.dot{r:5}g:hover>.bar{fill:var(--s1)}.cell:hover{stroke:var(--ink);stroke-width:1.5}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;align-items:center;font-size:.85rem;color:var(--muted);
margin:.4rem 0 0}
.legend i{display:inline-block;width:18px;border-top:3px solid;margin-right:.4rem;vertical-align:middle}
.legend i.dashed{border-top-style:dashed;border-top-width:2px}
.k1{color:var(--s1)}.k2{color:var(--s2)}.k3{color:var(--s3)}.k4{color:var(--s4)}
.legend i.bar-key{height:10px;border:0;background:var(--bar)}.mark-key{color:var(--s2)}
.legend i.ramp{width:160px;height:10px;border:0;border-radius:2px;margin:0;
background:linear-gradient(90deg,color-mix(in srgb,var(--heat) 6%,var(--panel)),var(--heat))}
.wide{overflow-x:auto;background:var(--panel);border:1px solid var(--rule);border-radius:8px;margin:.8rem 0}
table{border-collapse:collapse;width:100%;min-width:640px;font-size:.92rem}
th,td{padding:.42rem .8rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
tr:last-child td{border-bottom:0}th{font-weight:600;color:var(--muted);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.dense table{font-size:.85rem}.dense th,.dense td{padding:.3rem .55rem}.dense th{white-space:normal}
.notes td:last-child{min-width:11rem}
.summary td:nth-child(-n+3){white-space:nowrap}
.claims td:nth-child(1){min-width:15rem}.claims td:nth-child(2){min-width:9rem}
.yes,.no,.open{white-space:nowrap}.yes{color:var(--good);font-weight:600}.no{color:var(--bad);font-weight:600}.open{color:var(--muted)}
details{margin:.8rem 0}summary{cursor:pointer;font-weight:600}
.small{font-size:.85rem;color:var(--muted)}code{font-size:.92em}
"""


class Html(str):
    """Text that is markup already; everything else is escaped."""


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def figure(title: str, plot: str, caption: str = "") -> str:
    """A plot under the sentence that it shows; nothing if the plot is empty."""
    if not plot:
        return ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{plot}{below}</figure>\n"


def section(title: str, text: str, figures: Sequence[str]) -> str:
    """A heading, a paragraph and a grid of figures; nothing without figures."""
    shown = "".join(figures)
    if not shown:
        return ""
    return f'<h2>{escape(title)}</h2><p>{escape(text)}</p><div class="plots">{shown}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table; the columns at places ``numeric`` are set flush right. Cells are escaped unless ``Html``."""

    def cells(kind: str, row: Sequence[str]) -> str:
        parts = []
        for place, text in enumerate(row):
            side = ' class="n"' if place in numeric else ""
            parts.append(f"<{kind}{side}>{text if isinstance(text, Html) else escape(text)}</{kind}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f'<div class="wide"><table><thead>{cells("th", columns)}</thead><tbody>{body}</tbody></table></div>'
    )


def bullets(sentences: Sequence[str]) -> str:
    """The findings in short."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="short"><ul>{items}</ul></div>'
