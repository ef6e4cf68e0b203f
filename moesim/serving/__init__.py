"""Owns serving: requests that arrive, batches that change from step to step, what that means for the people who wait.

``load_serving`` reads a scenario, ``serve`` runs it, ``saturation`` runs it at several rates or numbers of users.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moesim.errors import InputError
from moesim.scenario import Workload, load_scenario
from moesim.serving.loop import ServingRun
from moesim.serving.requests import Requests, draw_requests
from moesim.serving.summary import ServingResult
from moesim.simulate import LONG_RUN_TASKS, Case, make_case

TASKS_PER_LAYER = 4  # of a step: attention, router, FFN, combine


def load_serving(name: str | Path, assignments: tuple[str, ...] = ()) -> tuple[Case, Requests]:
    """Load a scenario of requests by name or path, with ``path=value`` assignments; draw its requests.

    The layout is that of a batch of ``most_sequences`` of the longest requests in steps of ``step_tokens``.

    Raises
    ------
    InputError
        If anything about it is wrong; the message names file, field and fix.
    """
    scenario, document, base = load_scenario(name, assignments, "scenarios/serving")
    spec = scenario.serving
    if spec is None:
        raise InputError("serving", expected="a section serving", got="none", fix="add one, or use moesim run", where=document.source)
    requests = draw_requests(spec, scenario.seed, base, document.where(("serving", "file")))
    known = int((requests.prompt + requests.output).max())  # who gave way computes prompt and answer anew
    chunk = -(-spec.step_tokens // spec.most_sequences)
    work = Workload(prompt_tokens=known, output_tokens=int(requests.output.max()), batch=spec.most_sequences, prefill_chunk=chunk)
    memory = scenario.memory
    if not memory.context_tokens:
        memory = memory.model_copy(update={"context_tokens": known})
    scenario = scenario.model_copy(update={"workload": work, "memory": memory})
    case = make_case(scenario, document, base)
    if scenario.engine == "auto":
        steps = int(requests.output.sum()) / spec.most_sequences
        engine = "fast" if steps * TASKS_PER_LAYER * case.model.n_layers >= LONG_RUN_TASKS else "des"
        case = replace(case, scenario=case.scenario.model_copy(update={"engine": engine}))
    return case, requests


def serve(case: Case, requests: Requests, *, debug: bool = False) -> ServingResult:
    """Run all requests of a scenario to their end."""
    run = ServingRun(case, requests, debug=debug)
    run.run()
    return ServingResult(run)
