"""Owns the widgets of the what-if page: Streamlit runs this file anew after each change. What they mean is ``screen``'s and ``answers``' business.

Each control's key holds what it started from, so that another scenario or machine begins with its own values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import streamlit as st

from moesim import resources
from moesim.errors import InputError
from moesim.report import headline
from moesim.report.page import limiting
from moesim.ui import answers
from moesim.ui.answers import Answer
from moesim.ui.screen import CHOICES, FORMATS, LABELS, Figure, Screen, explain, has_ram_below, keep, machine_figures, start

AS_STATED = "as stated"
SCALE = 1e9  # figures are edited in GB and GB/s
# Less margin, so that one screen shows verdict and lanes; on a phone the bar with the menu lies above
STYLE = """<style>.stMainBlockContainer{padding:2rem 2rem 1rem}[data-testid=stMetricValue]{font-size:1.7rem}
@media(max-width:640px){.stMainBlockContainer{padding:4rem 1rem 1rem}}</style>"""
_HELP = {
    "model": "A bundled model, or type the path of a config.json, a GGUF file or a spec.",
    "hardware": "A bundled profile, or type parts joined by +, such as rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4.",
    "experts": "Format of the routed experts; everything else stays as the scenario states it.",
    "context_tokens": "0: what prompt and answer reach.",
    "hold": "fit, all, none, experts per layer (8), a share (50 %) or a size (4.8 GB), of the memory nearest to the experts' device.",
    "site": "fetch: load them to the device; in-place: the CPU computes them.",
}


def controls(side: str, at: Screen) -> Screen:
    """Show the controls of one configuration, beginning with what ``at`` says, and return what they say."""

    def key(field: str) -> str:
        return f"{side} {field} {at.scenario}"

    def choice(field: str, options: Sequence[str], new: bool = False) -> str:
        shown = list(options) if getattr(at, field) in options else [getattr(at, field), *options]
        index = shown.index(getattr(at, field))
        return str(
            st.selectbox(LABELS[field], shown, index=index, key=key(field), accept_new_options=new, help=_HELP.get(field)) or shown[index]
        )

    def count(field: str) -> int:
        value = getattr(at, field)
        return int(st.number_input(LABELS[field], min_value=0, value=value, step=1, key=key(field), help=_HELP.get(field)))

    dropped = st.file_uploader("Drop a config.json or a GGUF header", type=["json", "gguf", "yaml"], key=key("file"))
    model = keep(dropped.name, dropped.getvalue()) if dropped is not None else choice("model", list(resources.names("models")), new=True)
    formats = [AS_STATED, *FORMATS]
    experts = st.selectbox(LABELS["experts"], formats, formats.index(at.experts or AS_STATED), key=key("experts"), help=_HELP["experts"])
    hardware = choice("hardware", list(resources.names("hardware_profiles")), new=True)
    out = replace(at, model=model, experts="" if experts == AS_STATED else experts, hardware=hardware)
    with st.expander("Figures of the machine", expanded=True):
        out = replace(out, figures=_figures(side, out, dict(at.figures) if hardware == at.hardware else {}))
    with st.expander("Load", expanded=True):
        users, context, cached = count("users"), count("context_tokens"), count("cached_tokens")
        prompt, output = count("prompt_tokens"), count("output_tokens")
        out = replace(out, users=users, context_tokens=context, cached_tokens=cached, prompt_tokens=prompt, output_tokens=output)
    with st.expander("Policies", expanded=True):
        hold = st.text_input(LABELS["hold"], at.hold, key=key("hold"), help=_HELP["hold"])
        below = at.below
        if _known(out) and has_ram_below(out):
            below = st.text_input(LABELS["below"], at.below or "fit", key=key("below"), help=_HELP["hold"]).strip()
        return replace(
            out, hold=hold.strip(), below=below, policy=choice("policy", CHOICES["policy"]), site=choice("site", CHOICES["site"]),
            predictor=choice("predictor", CHOICES["predictor"]), distance=count("distance"),
            io_engine=choice("io_engine", CHOICES["io_engine"]), io_depth=count("io_depth"), io_threads=count("io_threads"),
        )  # fmt: skip


def _known(screen: Screen) -> Sequence[Figure]:
    """The figures of the machine; one that does not exist has none, and the answer says why."""
    try:
        return machine_figures(screen)
    except InputError:
        return ()


def _figures(side: str, screen: Screen, edited: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """One field for each figure of the machine."""
    out = []
    for figure in _known(screen):
        begin, key = edited.get(figure.path, figure.value) / SCALE, f"{side} {figure.path} {screen.hardware} {screen.scenario}"
        value = st.number_input(figure.label, min_value=0.0, value=begin, format="%.6g", key=key)
        if value != figure.value / SCALE:
            out.append((figure.path, value * SCALE))
    return tuple(out)


def verdict(found: Answer, beside: Answer | None) -> None:
    """Show whether it fits, and the figures that one looks at first; beside another answer the difference to it."""
    data = found.data
    (st.success if data["oom"] is None else st.error)(plain(headline(data)))
    metrics = data["metrics"]
    if metrics is None:
        return
    before = {label: value for label, value, _ in _figures_shown(beside)} if beside is not None else {}
    with st.container(horizontal=True):
        for label, value, better in _figures_shown(found):
            other = before.get(label)
            change = None if other is None or value is None else f"{value - other:+.3g}"
            st.metric(label, "-" if value is None else f"{value:.3g}", change, delta_color=better, width="content")
        st.metric("Limited by", limiting(data).split(",")[0], width="content")


def _figures_shown(found: Answer) -> list[tuple[str, float | None, Literal["normal", "inverse"]]]:
    """Label with unit, value, and whether more of it is better."""
    metrics = found.data["metrics"]
    if metrics is None:
        return []
    ttft = metrics["ttft_ms"]
    return [
        ("Decode (tokens/s)", metrics["decode_tok_s"], "normal"),
        ("First token (ms)", None if ttft is None else ttft["mean"], "inverse"),
        ("Load waits (ms a token)", metrics["io_wait_ms_per_token"], "inverse"),
    ]


def show(side: str, screen: Screen, beside: Answer | None = None) -> Answer | None:
    """Show the answer to one screen, or what is wrong with it."""
    try:
        with st.spinner("Simulating; the first run of an installation compiles for half a minute"):
            found = answers.answer(screen)
    except InputError as error:
        refuse(error)
        return None
    verdict(found, beside)
    st.iframe(answers.glance_html(found, side), height="content", alt=f"{side}: memory, lanes, critical path")
    with st.expander("The same from the command line"):
        st.download_button("Download the scenario (YAML)", found.yaml, "what-if.yaml", "text/yaml", key=f"{side} yaml")
        st.code("moesim run what-if.yaml", language="bash", wrap_lines=True)
        st.caption("or, with every change spelled out:")
        st.code(found.command, language="bash", wrap_lines=True)
    return found


def show_whatif(side: str, found: Answer) -> None:
    """Show what the speed depends on; every change is tried when asked for, as each is a run of its own."""
    every = st.button("Try every change (takes a while)", key=f"{side} every")
    bar = st.progress(0.0, "changes tried") if every else None

    def tick(done: int, of: int) -> None:
        if bar is not None:
            bar.progress(done / of, f"{done} of {of} changes tried")

    ahead = answers.what_if(found, every, tick)
    if tables := answers.whatif_html(ahead):
        st.iframe(tables, height="content", alt=f"{side}: what if")
    if bar is not None:
        bar.empty()


def refuse(error: InputError) -> None:
    """Show what is wrong, what was expected, what was got and how to mend it."""
    lines = [f"**{label}**: {plain(text)}" for label, text in explain(error)]
    st.error("This cannot be simulated.\n\n" + "\n\n".join(lines))


def plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]()<>#+.!|~$:&-])", r"\\\1", text)


def page(name: str) -> None:
    """Show the whole page, which begins with the scenario of a name."""
    st.set_page_config(page_title="moesim: what if", layout="wide")
    st.html(STYLE)
    with st.sidebar:
        st.title("moesim: what if")
        names = list(dict.fromkeys([name, *resources.names("scenarios")]))
        chosen = str(st.selectbox(LABELS["scenario"], names, key="scenario"))
        compare = st.toggle("Compare two configurations")
        sides = st.tabs(["A", "B"]) if compare else [st.container()]
        try:
            first = start(chosen)
        except InputError as error:
            refuse(error)
            return
        with sides[0]:
            screens = [controls("A", first)]
        if compare:
            copied = st.session_state.setdefault(f"B {chosen}", screens[0])
            with sides[1]:
                screens.append(controls("B", copied))
        else:
            st.session_state.pop(f"B {chosen}", None)
    if not compare:
        found = show("A", screens[0])
        if found is not None:
            show_whatif("A", found)
        return
    above = st.container()
    columns = st.columns(2, gap="large")
    shown: list[Answer] = []
    for side, screen, column in zip(("A", "B"), screens, columns, strict=True):
        with column:
            st.subheader(side)
            found = show(side, screen, shown[0] if shown else None)
        shown += [found] if found is not None else []
    if len(shown) == 2:
        above.iframe(answers.comparison_html(shown, ("A", "B")), height="content", alt="A and B compared")


page(sys.argv[1])
