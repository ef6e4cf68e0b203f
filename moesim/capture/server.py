"""Owns the recording of routing from a running server that speaks OpenAI's protocol and returns ``routed_experts``.

vLLM returns it with every answer when it was started with ``--enable-return-routed-experts``; SGLang needs that flag and the field
``return_routed_experts`` of the request. Plain HTTP requests of the standard library, one prompt at a time; of an answer only what
tells the routing is kept, on disk. ``trace_formats/routed_experts.py`` reads it.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moesim.errors import InputError
from moesim.trace import RoutingTrace
from moesim.trace_formats.routed_experts import EXTENSIONS, read_json
from moesim.trace_formats.source import Options, Source

TIMEOUT_S = 600.0  # of one answer: a long prompt on a slow machine takes minutes
MAX_ANSWER_BYTES = 1 << 30
FLAG = "start the server with --enable-return-routed-experts"
_KEPT = ("model", "usage", "prompt_routed_experts", "routed_experts", *EXTENSIONS)
_KEPT_OF_CHOICE = ("routed_experts", *EXTENSIONS, "prompt_tokens", "routed_experts_start_len")


def capture_server(
    url: str,
    prompts: Sequence[str | list[int]],
    *,
    new_tokens: int = 0,
    model: str | None = None,
    options: Options | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int], None] | None = None,
) -> RoutingTrace:
    """Send prompts to ``/v1/completions``, one at a time, and make a trace of the routing in the answers.

    Parameters
    ----------
    url : str
        Address of the server, with or without ``/v1``.
    prompts : sequence of str or list of int
        Texts or token ids.
    new_tokens : int
        Tokens to generate greedily; at least one is asked for, since the protocol has no request without an answer.
    model : str, optional
        Name of the served model; by default the first one the server lists.
    options : Options, optional
        Shape of the routing, where the server sends bare numbers (SGLang), and the number of experts.
    timeout_s : float
        Longest wait for one answer.
    progress : callable, optional
        Called with the number of answers, after each.

    Raises
    ------
    InputError
        If the server cannot be reached, refuses, is too slow, or its answers hold no routing.
    """
    base = _base(url)
    if not prompts:
        raise InputError("--prompts", expected="at least one prompt", got="none")
    name = model or _first_model(base, timeout_s)
    with tempfile.TemporaryDirectory(prefix="moesim-capture-") as folder:
        answers = Path(folder) / "answers.jsonl"
        with open(answers, "w", encoding="utf-8") as file:
            for number, prompt in enumerate(prompts):
                request = {
                    "model": name,
                    "prompt": prompt,
                    "max_tokens": max(new_tokens, 1),
                    "temperature": 0,
                    "return_routed_experts": True,
                }
                answer = _ask(f"{base}/completions", timeout_s, request)
                kept = _kept(answer)
                if b"routed_experts" not in json.dumps(kept).encode():
                    got = f"an answer without it to prompt {number}"
                    raise InputError("server", expected="routed_experts in its answers", got=got, fix=FLAG, where=url)
                file.write(json.dumps(kept) + "\n")
                if progress is not None:
                    progress(number + 1)
        try:
            trace = read_json(Source(answers), options or Options())
        except InputError as error:
            what, fix = f"server: {error.what}", error.fix
            raise InputError(what, expected=error.expected, got=error.got, fix=fix, where=url) from None
    facts = {"model": name, "captured_by": "moesim trace capture --server", "new_tokens": new_tokens}
    meta = {key: value for key, value in trace.meta.items() if key != "source_file"} | facts
    return RoutingTrace(trace.expert_ids, trace.weights, trace.seq_id, trace.position, trace.phase, meta, validate=False)


def _base(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise InputError("--server", expected="an address, as in http://127.0.0.1:8000", got=f'"{url}"')
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


def _first_model(base: str, timeout_s: float) -> str:
    listed = _ask(f"{base}/models", timeout_s)
    try:
        name = listed["data"][0]["id"]
        if isinstance(name, str):
            return name
    except (KeyError, IndexError, TypeError):
        pass
    raise InputError("server", expected="a list of models", got=json.dumps(listed)[:120], fix="name the model", where=f"{base}/models")


def _ask(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that the server answers; GET without a body, POST with one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", "Accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            text = reply.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = " ".join(error.read(400).decode("utf-8", "replace").split())
        raise InputError("server", expected="an answer", got=f"HTTP {error.code} {error.reason}: {said[:200]}", where=url) from None
    except TimeoutError:
        raise _slow(url, timeout_s) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _slow(url, timeout_s) from None
        fix = "is it running, and is the address right?"
        raise InputError("server", expected="a server that answers", got=str(error.reason), fix=fix, where=url) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        got = f"{type(error).__name__}: {str(error)[:120]}"
        raise InputError("server", expected="a whole answer", got=got, where=url) from None
    if len(text) > MAX_ANSWER_BYTES:
        raise InputError("server", expected=f"an answer of at most {MAX_ANSWER_BYTES} bytes", got="a longer one", where=url)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("server", expected="JSON", got=repr(text[:80]), where=url) from None
    if not isinstance(answer, dict):
        raise InputError("server", expected="a JSON object", got=type(answer).__name__, where=url)
    return answer


def _slow(url: str, timeout_s: float) -> InputError:
    return InputError("server", expected=f"an answer within {timeout_s:g} s", got="none", fix="give it more with --timeout", where=url)


def _kept(answer: dict[str, Any]) -> dict[str, Any]:
    """What tells the routing, without the text that was generated."""
    kept = {key: answer[key] for key in _KEPT if key in answer}
    choices = answer.get("choices")
    if isinstance(choices, list):
        kept["choices"] = [{key: c[key] for key in _KEPT_OF_CHOICE if key in c} if isinstance(c, dict) else {} for c in choices]
    return kept
