"""Owns the zoomable picture of lanes for a page: SVG that reads without scripts, and a few lines of script that zoom it.

Kinds of task look as in ``plots.py``. Bars are placed in thousandths of the picture's width; the script moves them, so hatches keep
their size.
"""

from __future__ import annotations

from html import escape

import numpy as np

from moesim import bottleneck
from moesim.perfetto import slice_name
from moesim.plots import MS, STYLES, Style, load_waits, middle_steps, step_name, task_styles
from moesim.simulate import Result
from moesim.text_table import percent

WIDTH, HEIGHT = 1000, 30
LEAST = 0.8  # of the picture's width in thousandths; thinner bars would vanish
TICKS = 5
_HATCHES = {
    "/": "M-1,1L1,-1M0,6L6,0M5,7L7,5",
    "\\": "M-1,5L1,7M0,0L6,6M5,-1L7,1",
    "x": "M0,6L6,0M0,0L6,6",
    "|": "M3,0L3,6",
    "-": "M0,3L6,3",
    ".": "M2,3L4,3",
}


def patterns() -> str:
    """Return the hatches of all kinds, once for a page."""
    parts = "".join(
        f'<pattern id="kind-{name}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{s.colour}"/>'
        f'<path d="{_HATCHES[s.hatch[0]]}" stroke="{s.edge}" stroke-width="1.2" fill="none"/></pattern>'
        for name, s in STYLES.items()
        if s.hatch
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{parts}</defs></svg>'


def lanes_html(result: Result, label: str) -> str:
    """Return what each lane does in a few steps of a run: a row of bars per server, an axis, a legend, buttons to zoom.

    Parameters
    ----------
    result : Result
        One that kept its tasks.
    label : str
        What the picture is of, for readers that do not see it.
    """
    tasks = result.tasks
    first, last = middle_steps(tasks)
    ends = np.concatenate([[0], tasks.end[tasks.steps[:, 2]]])
    begin, end = int(ends[first]), int(ends[last + 1])
    span = max(end - begin, 1)
    seen = (tasks.start < end) & (tasks.end > begin)
    styles, waits = task_styles(tasks), load_waits(tasks)
    data = result.as_dict()
    shares = bottleneck.lane_shares(data["critical_path"])
    limiting = next(iter(shares), "")
    out = [
        f'<div class="lanes" data-ms="{span * MS:.9g}">',
        '<div class="zoom"><button type="button" data-zoom="2">zoom in</button> <button type="button" data-zoom="0.5">zoom out</button> '
        '<button type="button" data-move="-0.5" aria-label="earlier">&#8592;</button> '
        '<button type="button" data-move="0.5" aria-label="later">&#8594;</button> '
        '<button type="button" data-zoom="0">all</button> <span>or drag; hold Ctrl and turn the wheel</span></div>',
    ]
    marks = [(float(ends[step]) - begin) / span for step in range(first, last + 1)]
    used = []
    for number, lane in enumerate(tasks.lanes):
        for server in range(lane.width):
            rows = np.flatnonzero(seen & (tasks.lane == number) & (tasks.server == server))
            if not (tasks.lane == number).any():
                continue
            bars = []
            for task in rows.tolist():
                name = slice_name(int(tasks.kind[task]), int(tasks.layer[task]), int(tasks.expert[task]), bool(tasks.prefetch[task]))
                a, b = ((x - begin) / span for x in (int(tasks.start[task]), int(tasks.end[task])))
                if b > a:
                    bars.append(_bar(a, b, str(styles[task]), f"{name}: {(b - a) * span * MS:.3g} ms"))
                    used.append(str(styles[task]))
                if waits[task, 1] > waits[task, 0]:
                    a, b = ((x - begin) / span for x in waits[task].tolist())
                    bars.append(_bar(a, b, "stall", f"{name} waits for loads: {(b - a) * span * MS:.3g} ms"))
                    used.append("stall")
            title = lane.name if lane.width == 1 else f"{lane.name} #{server}"
            facts = (
                f"{percent(data['lanes'][lane.name]['utilisation'], 0)} busy, {percent(shares.get(lane.name, 0.0), 0)} of the critical path"
            )
            emphasis = ' class="limits"' if lane.name == limiting else ""
            lines = "".join(f'<line data-a="{m:.7g}" x1="{m * WIDTH:.2f}" x2="{m * WIDTH:.2f}" y1="0" y2="{HEIGHT}"/>' for m in marks)
            out.append(
                f"<p{emphasis}><b>{escape(title)}</b> {facts}</p>"
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(f"{label}: {title}, {facts}")}">'
                + "".join(bars)
                + lines
                + "</svg>"
            )
    out.append('<div class="axis">' + "".join(f"<span>{i / TICKS * span * MS:.3g}</span>" for i in range(TICKS + 1)) + "</div>")
    which = step_name(tasks, first) + (f" to {step_name(tasks, last)}" if last > first else "")
    out.append(f'<p class="small">time since the start of {escape(step_name(tasks, first))} (ms); shown: {escape(which)}</p>')
    out.append(_legend([(name, style) for name, style in STYLES.items() if name in used]) + "</div>")
    return "".join(out)


def _bar(a: float, b: float, kind: str, title: str) -> str:
    y, height = (10, 10) if kind == "stall" else (1, 28)
    width = max((b - a) * WIDTH, LEAST)
    return (
        f'<rect data-a="{a:.7g}" data-b="{b:.7g}" x="{a * WIDTH:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{_fill(kind)}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _fill(kind: str) -> str:
    return f"url(#kind-{kind})" if STYLES[kind].hatch else STYLES[kind].colour


def _legend(kinds: list[tuple[str, Style]]) -> str:
    boxes = "".join(
        f'<span><svg viewBox="0 0 24 12" class="box" aria-hidden="true"><rect width="24" height="12" fill="{_fill(name)}"/></svg>'
        f"{escape(style.label)}</span>"
        for name, style in kinds
    )
    return f'<p class="legend">{boxes}</p>'


STYLE = """
.lanes svg{display:block;width:100%;height:30px;background:#f5f5f2;touch-action:pan-y}.lanes p{margin:.5em 0 .1em}
.lanes .limits{color:#b00020}.lanes line{stroke:#000;stroke-dasharray:4 3;vector-effect:non-scaling-stroke}
.axis{display:flex;justify-content:space-between;font-size:12px}.legend{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:13px}
.lanes .legend .box{display:inline-block;width:24px;height:12px;margin-right:.4em;vertical-align:-1px}
.zoom{margin:.4em 0}.zoom button{font:inherit;padding:.25em .8em;min-width:2.6em}.zoom span{font-size:12px;color:#555}
.no-script .zoom{display:none}@media print{.zoom{display:none}}
"""
SCRIPT = """
document.documentElement.classList.remove('no-script');
for (const box of document.querySelectorAll('.lanes')) {
  let a = 0, b = 1;
  const ms = +box.dataset.ms, svgs = box.querySelectorAll(':scope > svg'), ticks = box.querySelectorAll('.axis span');
  const draw = () => {
    const at = t => (t - a) / (b - a) * 1000;
    for (const r of box.querySelectorAll(':scope > svg > rect')) {
      r.setAttribute('x', at(+r.dataset.a)); r.setAttribute('width', Math.max(at(+r.dataset.b) - at(+r.dataset.a), 0.8));
    }
    for (const l of box.querySelectorAll(':scope > svg > line')) { l.setAttribute('x1', at(+l.dataset.a)); l.setAttribute('x2', at(+l.dataset.a)); }
    ticks.forEach((t, i) => { t.textContent = +((a + (b - a) * i / (ticks.length - 1)) * ms).toPrecision(4); });
  };
  const show = (from, width) => { width = Math.min(Math.max(width, 1e-4), 1); a = Math.min(Math.max(from, 0), 1 - width); b = a + width; draw(); };
  const zoom = (factor, where) => show(a + (b - a) * where * (1 - 1 / factor), (b - a) / factor);
  for (const button of box.querySelectorAll('button')) button.addEventListener('click', () => {
    if (button.dataset.move) show(a + button.dataset.move * (b - a), b - a);
    else if (+button.dataset.zoom) zoom(+button.dataset.zoom, 0.5); else show(0, 1);
  });
  for (const svg of svgs) {
    svg.addEventListener('wheel', e => {
      if (!e.ctrlKey) return;
      e.preventDefault(); zoom(e.deltaY < 0 ? 1.3 : 1 / 1.3, e.offsetX / svg.clientWidth);
    }, {passive: false});
    svg.addEventListener('pointerdown', e => svg.setPointerCapture(e.pointerId));
    svg.addEventListener('pointermove', e => { if (e.buttons) show(a - e.movementX / svg.clientWidth * (b - a), b - a); });
  }
}
addEventListener('beforeprint', () => { for (const d of document.querySelectorAll('details')) d.open = true; });
"""
