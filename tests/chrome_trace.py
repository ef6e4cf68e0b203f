"""A strict reader of Chrome trace JSON: what "Trace Event Format" (Google, 2016) says of the events we write, and what Perfetto's importer counts
as an error of them.

Perfetto's trace_processor is a binary that its Python package fetches when it is first used, so it cannot be had offline; this stands for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
NEEDED = {  # phase: keys that an event must have, and those that it may have beside them
    "M": ({"ph", "pid", "tid", "name", "args"}, set()),
    "X": ({"ph", "pid", "tid", "name", "ts", "dur"}, {"cat", "args"}),
    "C": ({"ph", "pid", "tid", "name", "ts", "args"}, set()),
    "s": ({"ph", "pid", "tid", "name", "cat", "ts", "id"}, set()),
    "f": ({"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"}, set()),
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}


def ns(us: float) -> int:
    """Microseconds as Perfetto reads them: whole nanoseconds."""
    return int(us * 1000)


def problems(document: dict[str, Any]) -> list[str]:
    """Return what an importer would refuse or misread; nothing if all is well."""
    out = [] if document.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit"]
    out += [f"unknown key {key}" for key in document.keys() - {"traceEvents", "displayTimeUnit", "otherData"}]
    sound = []
    for i, event in enumerate(document["traceEvents"]):
        wrong = _event(event)
        out += [f"event {i}: {wrong}"] if wrong else []
        sound += [] if wrong else [event]
    return out + _nesting(sound) + _counters(sound) + _flows(sound) + _names(sound)


def _event(event: Event) -> str:
    needed, allowed = NEEDED.get(event.get("ph", ""), (set(), set()))
    if not needed:
        return f"unknown phase {event.get('ph')!r}"
    if event.keys() - needed - allowed or needed - event.keys():
        return f"keys {sorted(event)} for phase {event['ph']}"
    if not all(type(event[key]) is int for key in ("pid", "tid")) or not (isinstance(event["name"], str) and event["name"]):
        return "pid, tid or name"
    for key in ("ts", "dur"):
        if key in event and not (type(event[key]) in (int, float) and math.isfinite(event[key]) and event[key] >= 0):
            return f"{key} {event[key]!r}"
    if event["ph"] == "M":
        key, kind = METADATA.get(event["name"], ("", object))
        if set(event["args"]) != {key} or type(event["args"][key]) is not kind:
            return f"metadata {event['name']}: {event['args']}"
    if event["ph"] == "C" and not (event["args"] and all(type(x) in (int, float) and math.isfinite(x) for x in event["args"].values())):
        return f"counter {event['args']}"
    return "" if event.get("bp", "e") == "e" else "bp"


def slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Return (start, end, name) of the slices of each track in the order of an importer: by start, the longest first."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            tracks[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    return {track: sorted(spans, key=lambda s: (s[0], -s[1])) for track, spans in tracks.items()}


def _nesting(events: list[Event]) -> list[str]:
    out = []
    for track, spans in slices(events).items():
        stack: list[tuple[int, int, str]] = []
        for span in spans:
            while stack and stack[-1][1] <= span[0]:
                stack.pop()
            if stack and span[1] > stack[-1][1]:
                out.append(f"track {track}: {span} ends after {stack[-1]}, in which it begins")
            stack.append(span)
    return out


def _counters(events: list[Event]) -> list[str]:
    """A counter goes forward in time and keeps its series."""
    last: dict[tuple[int, str], Event] = {}
    out = []
    for event in events:
        if event["ph"] == "C":
            before = last.get((event["pid"], event["name"]), event)
            if before["ts"] > event["ts"] or before["args"].keys() != event["args"].keys():
                out.append(f"counter {event['name']} at {event['ts']} after {before['ts']}")
            last[event["pid"], event["name"]] = event
    return out


def _flows(events: list[Event]) -> list[str]:
    """Each flow has one begin and one end of the same name and category, in this order, each within a slice of its track."""
    tracks = {track: {start for start, _, _ in spans} for track, spans in slices(events).items()}
    ends: dict[Any, list[Event]] = defaultdict(list)
    out = []
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
            if ns(event["ts"]) not in tracks.get((event["pid"], event["tid"]), ()):
                out.append(f"flow {event['id']} has no slice at {event['ts']}")
    for key, both in ends.items():
        if [event["ph"] for event in sorted(both, key=lambda e: e["ts"])] != ["s", "f"]:
            out.append(f"flow {key}: {[(event['ph'], event['ts']) for event in both]}")
    return out


def _names(events: list[Event]) -> list[str]:
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    called = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    return [f"track {track} has no name" for track in sorted(used - named)] + [
        f"process {pid} has no name" for pid in sorted({e["pid"] for e in events} - called)
    ]
