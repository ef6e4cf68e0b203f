"""Owns recording the routing of a GGUF model while llama.cpp runs it: ``ffn_moe_topk-<layer>`` of its graph, the experts of each token.

Every token of a prompt is asked for output, because the engine's last layer sees only tokens whose output is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.capture.files import parts_beside, prompts_of
from moesim.capture.llama_cpp import VERSION, LlamaCpp
from moesim.errors import InputError
from moesim.host.cores import cores
from moesim.model_files.gguf_model import model_from_gguf
from moesim.trace import DECODE, PREFILL, RoutingTrace

TENSOR = "ffn_moe_topk-"


def capture_gguf(
    model: Path,
    prompts: Path,
    out: Path,
    *,
    new_tokens: int = 0,
    max_prompt: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RoutingTrace:
    """Run prompts through a GGUF model and write the trace.

    Parameters
    ----------
    model : path
        A ``.gguf`` file of an MoE model.
    prompts : path
        As ``read_prompts`` takes them; texts are split by the vocabulary in the file.
    out : path
        The ``.npz`` to write.
    new_tokens : int
        Tokens to generate greedily after each prompt; the last one has no row.
    max_prompt : int, optional
        Longer prompts are cut to their first tokens.
    progress : callable, optional
        Called with the number of prompts and of rows recorded, after each prompt.

    Raises
    ------
    InputError
        If llama.cpp is not installed, the file is no MoE model that it runs, or a prompt does not fit the vocabulary.
    """
    spec, _ = model_from_gguf(model)
    if not spec.moe_layers:
        raise InputError("MODEL", expected="a Mixture-of-Experts model", got=f"{spec.name}, which has no experts", where=str(model))
    given = prompts_of(prompts)
    longest = max(len(p.encode()) + 8 if isinstance(p, str) else len(p) for _, p in given)
    longest = min(longest, max_prompt or longest)
    heard: dict[int, list[NDArray[np.int32]]] = {}

    def see(name: str, ids: NDArray[np.int32]) -> None:
        heard.setdefault(int(name.removeprefix(TENSOR)), []).append(ids)

    def rows() -> NDArray[np.int16]:
        layers = [np.concatenate(heard[layer]) for layer in sorted(heard)]
        heard.clear()
        return np.stack(layers, axis=1).astype(np.int16)

    threads = cores()
    with parts_beside(out) as parts:
        with (
            LlamaCpp(model, context=longest + new_tokens, threads=threads, watch=lambda name: name.startswith(TENSOR), see=see) as llama,
            parts,
        ):
            facts: list[dict[str, Any]] = []
            for number, (line, prompt) in enumerate(given):
                tokens = (llama.tokenize(prompt) if isinstance(prompt, str) else prompt)[:max_prompt]
                _check(tokens, llama.vocabulary, f"{prompts}:{line}")
                llama.rewind(0)
                scores = llama.decode(tokens, all_outputs=True)
                parts.append(rows(), None, number, 0, PREFILL)
                for made in range(new_tokens - 1):
                    scores = llama.decode([int(scores.argmax())])
                    parts.append(rows(), None, number, len(tokens) + made, DECODE)
                facts.append({"seq_id": number, "prompt_tokens": len(tokens), "new_tokens": new_tokens})
                if progress is not None:
                    progress(number + 1, parts.n_rows)
        (n_layers, top_k), _ = parts.shape
        meta = {"model": spec.name, "n_layers": n_layers, "n_experts": spec.n_experts, "top_k": top_k, "new_tokens": new_tokens,
                "captured_by": f"moesim trace capture (llama.cpp in xllamacpp {VERSION})", "sequences": facts, "notes": []}  # fmt: skip
        return parts.finish(meta, out)


def _check(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    bad = [token for token in tokens if not 0 <= token < vocabulary]
    if bad or not tokens:
        raise InputError("prompt", expected=f"token ids from 0 to {vocabulary - 1}", got=str(bad[0]) if bad else "no tokens", where=where)
