"""The picture of one or two replayed schedules as one HTML file: the figures by name, the drawing, and an explanation of whatever the pointer is on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..schedules.bounds import bound_of
from ..schedules.messages import blocking_orders
from ..schedules.timeline import MAX_CHECKED, Timeline
from .timeline import title_of, to_svg

STYLE = """
body{font-family:Helvetica,Arial,sans-serif;margin:20px 24px;color:#111;background:#fff}
h1{font-size:20px;margin:0 0 12px}table{border-collapse:collapse;margin:0 0 18px;font-size:13px}
th,td{padding:3px 14px 3px 0;text-align:left;vertical-align:top}td.v{text-align:right;font-variant-numeric:tabular-nums}
tr+tr td{border-top:1px solid #ddd}td.w{color:#444;max-width:420px}.scroll{overflow-x:auto}
#tip{position:fixed;display:none;background:#111;color:#fff;font-size:12px;padding:5px 8px;border-radius:3px;pointer-events:none;max-width:420px;z-index:9}
.from rect{stroke:#d0021b!important;stroke-width:2.4px!important}
"""
SCRIPT = """
const tip=document.getElementById('tip');let lit=[];
for(const g of document.querySelectorAll('g.g')){const t=g.querySelector('title');if(t){g.dataset.t=t.textContent;t.remove();}}
document.addEventListener('mousemove',e=>{
  const g=e.target.closest&&e.target.closest('g.g');lit.forEach(x=>x.classList.remove('from'));lit=[];
  if(!g||!g.dataset.t){tip.style.display='none';return;}
  let text=g.dataset.t;
  for(const id of (g.dataset.n||'').split(' ')){const n=id&&document.getElementById(id);
    if(n){n.classList.add('from');lit.push(n);text+=' \\u2014 waits for '+n.dataset.t.split(':')[0];}}
  tip.textContent=text;tip.style.display='block';
  tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
  tip.style.top=Math.min(e.clientY+16,innerHeight-tip.offsetHeight-8)+'px';});
"""


def figures(t: Timeline) -> list[tuple[str, str, str]]:
    """(name, value, what it means) of a timeline, in the order in which people read them."""
    bound = bound_of(t)
    causes = ", ".join(f"{k} {v:.6g}" for k, v in t.idle_by_cause.items() if abs(v) > 1e-9 * max(t.idle, 1e-300))
    peaks = t.peak_per_rank
    blocking = []
    if t.messages and len(t.table) <= MAX_CHECKED:
        kinds = {"fine": "fine", "deadlock": "deadlock"}
        verdicts = {name: kinds.get(reason.split(":")[0], "wrong order") for name, reason in blocking_orders(t.table).items()}
        words = ", ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())
        blocking = [("if messages block", words, "each received right before its use; posted by itself, or with the send before it")]
    low, high = min(peaks), max(peaks)
    return [
        ("makespan", f"{t.makespan:.6g}", "first start to last end"),
        ("bubble, idle/total", f"{t.bubble_total:.2%}", "idle time of all ranks over ranks x makespan"),
        ("bubble, idle/useful", f"{t.bubble_useful:.2%}", "idle time of all ranks over their work"),
        ("bubble, span", f"{t.bubble_span:.2%}", "worst rank, between its own first and last action"),
        ("idle time by cause", causes or "none", f"sums to {t.idle:.6g}"),
        ("lower bound", f"{bound.makespan:.6g}", f"{bound.reason}; this order is {t.makespan / bound.makespan - 1:.1%} above"),
        (
            "peak activations",
            f"{high:.4g}" if low == high else f"{low:.4g} to {high:.4g}",
            "microbatches of one rank, held from F to the end of W",
        ),
        ("weight copies", f"{t.weight_copies}", "of each rank's share of the model"),
        ("messages", f"{t.messages:,}", "activations and gradients between ranks, a step"),
        *blocking,
    ]


def to_html(timelines: Timeline | Sequence[Timeline], titles: Sequence[str] = (), note: str = "", width: float | None = None) -> str:
    """One self-contained page: nothing is loaded from elsewhere."""
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    names = [titles[n] if n < len(titles) else title_of(t) for n, t in enumerate(shown)]
    columns = [figures(t) for t in shown]
    head = "".join(f"<th>{escape(n)}</th>" for n in names) if len(shown) > 1 else ""
    rows = [f"<tr><th></th>{head}<th></th></tr>"] if head else []
    for line in zip(*columns):
        values = "".join(f'<td class="v">{escape(value)}</td>' for _, value, _ in line)
        means = line[0][2] if len(line) == 1 or line[0][0] not in ("lower bound", "idle time by cause") else ""
        rows.append(f'<tr><td>{escape(line[0][0])}</td>{values}<td class="w">{escape(means)}</td></tr>')
    title = escape(" against ".join(t.name for t in shown))
    extra = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pipeline schedule {title}</title><style>{STYLE}</style></head><body>'
        f"<h1>Pipeline schedule {title}</h1>{extra}<table>{''.join(rows)}</table>"
        f'<div class="scroll">{to_svg(shown, names, width)}</div><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )
