"""Owns the way from a llama.cpp command line to a scenario, and from a laid-out scenario back to flags.

Where tensors lie (llama.cpp, src/llama-model.cpp; the fork counts the output layer last instead of first):

    first layer on the GPU = max(layers + 1 - ngl, 0)      the output layer is number ``layers``; in the fork max(layers - ngl, 0)
    card of layer i        = first whose cumulated share of -ts passes (i - first) / min(ngl, layers + 1)
    a tensor's device      = that of the first -ot, -cmoe, -ncmoe pattern found in its name, else its layer's

The input embedding always stays in main memory. A scenario places attention (with router, norms and dense FFN), routed experts and shared
experts of a layer as wholes: where patterns part them, most of their tensors decide, and a note says so.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from moesim.architecture import MlaAttention
from moesim.backtest.buffers import compute_buffers
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, kind
from moesim.hardware.compose import find_hardware
from moesim.layout import Layout
from moesim.llama.model import cache_type, meant_model
from moesim.llama.options import BENCH, EXPERTS_PATTERN, FORK, MAINLINE, LlamaCommand
from moesim.llama.quants import spans
from moesim.llama.tensors import unmatched
from moesim.model import ModelSpec
from moesim.runtimes import RunFacts, Runtime, runtime_of
from moesim.scenario import Scenario
from moesim.simulate import Case, make_case, stated_plan

_TENSORS = {
    "attention": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "latent": ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_output"),
    "routed_experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "shared_expert": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
}
_CARD = re.compile(r"(?:CUDA|ROCm|Vulkan|SYCL|Metal|HIP|MUSA|CANN)_?(\d*)", re.IGNORECASE)
LOSSLESS = "f16"


@dataclass(frozen=True)
class Translation:
    """A scenario as plain data, ready to be written as YAML, and what the line says that it does not."""

    scenario: dict[str, Any]
    notes: tuple[str, ...]


def to_scenario(command: LlamaCommand, hardware: str, model: str = "", name: str = "", precision: Any = None) -> Translation:
    """Return the scenario of a command line on a machine.

    Parameters
    ----------
    command : LlamaCommand
    hardware : str
        A profile, or parts joined by ``+``.
    model : str
        Stands for the line's own, see ``meant_model``.
    name : str
        Of the scenario.
    precision : str or Mapping
        As in a scenario, in place of what the file's name says, see ``meant_model``.

    Raises
    ------
    InputError
        If model, machine or a device that the line names is unknown.
    """
    machine, meant = find_hardware(hardware, Path(), "--hardware"), meant_model(command, model, precision)
    runtime = runtime_of(command.engine)
    notes = [*command.notes, *meant.notes]
    places = _places(command, meant.model, machine, notes)
    run = _facts(command, meant.model, machine, runtime, places)
    context, chunk = _context(command, runtime, meant.model), _chunk(command, meant.model, notes)
    copies = command.engine == MAINLINE and places.mixed and command.copies_experts and runtime.choose("prefill_experts", run) == "gpu"
    placement = _placement(places, meant.model, machine, command.mapped)
    if copies:
        _stream(placement, places, meant.model, machine, runtime)
    scenario: dict[str, Any] = {
        "name": name or "from-llama",
        "model": meant.name,
        "precision": meant.precision,
        "hardware": hardware,
        "trace": {"generate": "uniform"},
        "workload": {
            "prompt_tokens": command.prompt, "output_tokens": command.generate, "batch": command.parallel if command.tool != BENCH else 1,
            "prefill_chunk": chunk, "cached_tokens": command.depth,
        },
        "memory": {"context_tokens": context, "mla_compressed": _compressed(command, runtime, run)},
        "placement": placement,
        "io": {"engine": "mmap"} if command.mapped and machine.storage else {},
        "granularity": "layer",
    }  # fmt: skip
    if command.prompt == command.generate == 0:
        raise InputError("command line", expected="a prompt or an answer", got="-p 0 -n 0")
    threads = _threads(command, machine, places, notes)
    scenario["runtime"] = {"name": runtime.name} | ({"threads": threads} if threads is not None else {})
    spec = build(Scenario, Document(scenario, "command line"))
    plan = stated_plan(spec.precision, None if not _from_file(meant.precision) else make_case(spec).plan, "")
    layout = Layout(spec, meant.model, plan, machine)
    cards = max(len(set(places.attention) - {"cpu"}), 1)
    buffers = list(compute_buffers(layout, runtime, run, chunk, context, gpus=cards))
    scenario["memory"]["workspace"] = f"{max(buffers)} B"
    notes += unmatched((o for o in command.overrides if not o[0].endswith(EXPERTS_PATTERN)), meant.model)
    notes += _unmodelled(command, places, spec, meant.model, bool(_cards(machine)))
    return Translation({key: value for key, value in scenario.items() if value != {}}, tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class Places:
    """The device of each part, layer by layer, and that of the output layer."""

    attention: tuple[str, ...]
    routed_experts: tuple[str, ...]
    shared_expert: tuple[str, ...]
    head: str

    @property
    def mixed(self) -> bool:
        """Whether a GPU computes attention of layers whose experts the CPU holds."""
        return any(a != "cpu" and e == "cpu" for a, e in zip(self.attention, self.routed_experts, strict=True))

    @property
    def uses_cpu(self) -> bool:
        return "cpu" in (*self.attention, *self.routed_experts, *self.shared_expert)


def _cards(machine: HardwareProfile) -> list[str]:
    return [name for name in machine.devices if kind(name) == "gpu"]


def _places(command: LlamaCommand, model: ModelSpec, machine: HardwareProfile, notes: list[str]) -> Places:
    cards, n = _cards(machine), model.n_layers
    if "cpu" not in machine.devices:
        raise InputError("--hardware", expected="a machine with a CPU", got=machine.name)
    if not cards and command.gpu_layers not in (None, 0):
        notes.append(f"-ngl {command.gpu_layers}: {machine.name} has no GPU; everything is computed by the CPU")
    own = _layer_devices(command, cards, [machine.tiers[machine.devices[c].tier].capacity.value for c in cards], n)
    parted: set[str] = set()

    def device(part: str, tensors: str, layer: int) -> str:
        chosen = [_overridden(command, f"blk.{layer}.{t}.weight", own[layer], cards) for t in _TENSORS[tensors]]
        if len(set(chosen)) > 1:
            parted.add(part)
        return Counter(chosen).most_common(1)[0][0]

    found = {
        part: tuple(device(part, "latent" if part == "attention" and isinstance(model.attention_at(i), MlaAttention) else part, i) for i in range(n))
        for part in ("attention", "routed_experts", "shared_expert")
    }  # fmt: skip
    notes += [
        f"-ot: tensors of a layer's {part.replace('_', ' ')} are parted; the device of most of them is taken" for part in sorted(parted)
    ]
    dense = [i for i in range(n) if model.dense_size(i) and not model.is_moe(i)]
    if any(_overridden(command, f"blk.{i}.ffn_up.weight", own[i], cards) != found["attention"][i] for i in dense):
        notes.append("-ot: a dense FFN goes with its layer's attention")
    return Places(**found, head=_overridden(command, "output.weight", own[n], cards))


def _layer_devices(command: LlamaCommand, cards: Sequence[str], sizes: Sequence[int], n: int) -> list[str]:
    """Device of each layer and, last, of the output layer."""
    asked = n + 1 if command.gpu_layers is None else command.gpu_layers
    first = max((n if command.engine == FORK else n + 1) - asked, 0)
    held = min(asked, n + 1)
    out = ["cpu"] * (n + 1)
    if not cards or not held:
        return out
    if command.main_gpu >= len(cards):
        raise InputError("option -mg", expected=f"a card of the machine, 0 to {len(cards) - 1}", got=str(command.main_gpu))
    if len(command.tensor_split) > len(cards) > 1:
        raise InputError("option -ts", expected=f"at most {len(cards)} shares, one a card", got=str(len(command.tensor_split)))
    shares = list(command.tensor_split or sizes) if command.split_mode != "none" and len(cards) > 1 else []
    shares += [0.0] * (len(cards) - len(shares))
    ends = [total / (sum(shares) or 1) for total in accumulate(shares)]
    for layer in range(first, n + 1):
        if layer - first < held:
            card = min(bisect_right(ends, (layer - first) / held), len(cards) - 1) if sum(shares) else command.main_gpu
            out[layer] = cards[card]
    return out


def _overridden(command: LlamaCommand, tensor: str, own: str, cards: Sequence[str]) -> str:
    buffer = next((buffer for pattern, buffer in command.overrides if re.search(pattern, tensor)), "")
    if not buffer:
        return own
    if buffer.upper().startswith("CPU") or buffer.lower().endswith("_host"):
        return "cpu"
    match = _CARD.fullmatch(buffer)
    if not match or int(match[1] or 0) >= len(cards):
        known = ", ".join(["CPU", *(f"CUDA{i}" for i in range(len(cards)))])
        raise InputError("option -ot", expected=f"a buffer of this machine: {known}", got=f'"{buffer[:40]}"')
    return cards[int(match[1] or 0)]


def _facts(command: LlamaCommand, model: ModelSpec, machine: HardwareProfile, runtime: Runtime, places: Places) -> RunFacts:
    flags = {f"mla={command.mla}"} if command.mla is not None else set()
    flags |= {"rtr"} if command.repack else set()
    flags |= set() if command.mapped else {"no-mmap"}
    cards = _cards(machine)
    run = RunFacts(flags=frozenset(flags), latent=isinstance(model.attention, MlaAttention), mixed=places.mixed,
                   kv=command.cache_k, gpu=str(machine.devices[cards[0]].chip) if cards else "")  # fmt: skip
    flash = runtime.choose("flash", run) == "yes" if command.flash is None else command.flash
    return replace(run, flash=flash)


def _compressed(command: LlamaCommand, runtime: Runtime, run: RunFacts) -> bool:
    return command.mla != 0 if command.mla is not None else runtime.choose("latent_cache", run) == "compressed"


def _whole_context(command: LlamaCommand, model: ModelSpec) -> int | None:
    """Tokens of the whole cache that the line states or, in llama-bench, its test reaches; None where neither is known."""
    if command.tool == BENCH:
        return command.depth + command.prompt + command.generate
    return model.max_context if command.context == 0 else command.context


def _context(command: LlamaCommand, runtime: Runtime, model: ModelSpec) -> int:
    """Tokens of one sequence's cache: what is stated, divided among parallel ones; else what the run reaches."""
    reached = command.depth + command.prompt + command.generate
    stated = (_whole_context(command, model) or 0) // command.parallel if command.tool != BENCH else 0
    return -(-max(stated, reached) // runtime.kv_round_tokens) * runtime.kv_round_tokens


def _chunk(command: LlamaCommand, model: ModelSpec, notes: list[str]) -> int:
    """Tokens of a prompt that are computed together; as in llama.cpp (llama_context) at most the batch, and that at most the context."""
    asked, most = min(command.ubatch, command.batch), _whole_context(command, model)
    if most and asked > most:
        if command.tool != BENCH:
            notes.append(f"-ub {asked}: the context has {most} tokens; llama.cpp computes no more together")
        return most
    return asked


def _placement(places: Places, model: ModelSpec, machine: HardwareProfile, mapped: bool) -> dict[str, Any]:
    main = next(tier for tier in machine.tiers if kind(tier) in ("ram", "unified"))
    base, rules = places.head, []
    tables: list[tuple[str, Iterable[int], Callable[[int], str]]] = [
        ("attention", range(model.n_layers), lambda i: base),
        ("routed_experts", model.moe_layers, lambda i: base),
        ("shared_expert", [i for i in model.moe_layers if model.layer_params(i, "shared_expert")], lambda i: places.attention[i]),
    ]
    for part, layers, usual in tables:
        devices: tuple[str, ...] = getattr(places, part)
        groups: dict[str, list[int]] = {}
        for layer in layers:
            if devices[layer] != usual(layer):
                groups.setdefault(devices[layer], []).append(layer)
        rules += [{"layers": spans(group), "part": part, "device": device} for device, group in groups.items()]
    pools: dict[str, dict[str, Any]] = {}
    for device in dict.fromkeys(places.routed_experts[i] for i in model.moe_layers):
        tier = machine.devices[device].tier
        if tier == "vram":
            pools[tier] = {"hold": "all"}
        elif tier == main:
            pools[tier] = {"hold": "fit", "policy": "lru", "warm": True} if mapped and machine.storage else {"hold": "all"}
    out: dict[str, Any] = {"attention": base, "experts": base, "embeddings": main, "pools": pools}
    return out | ({"layers": rules} if rules else {})


def _stream(placement: dict[str, Any], places: Places, model: ModelSpec, machine: HardwareProfile, runtime: Runtime) -> None:
    """Large batches copy experts in main memory to the GPU, into room for one of a layer's three matrices."""
    placement["stream_from"] = runtime.copy_from_tokens
    for device in dict.fromkeys(a for a, e in zip(places.attention, places.routed_experts, strict=True) if a != "cpu" and e == "cpu"):
        placement["pools"].setdefault(machine.devices[device].tier, {"hold": "all"})["transient_slots"] = -(-model.n_experts // 3)


def _threads(command: LlamaCommand, machine: HardwareProfile, places: Places, notes: list[str]) -> int | None:
    """Cores of the CPU that compute; None: all."""
    found = machine.devices["cpu"].cores
    if command.threads is None or not places.uses_cpu or found is None:
        return None
    cores = int(found.value)
    if command.threads < cores:
        notes.append(
            f"-t {command.threads}: {command.threads / cores:.0%} of the CPU's arithmetic; that fewer threads also draw less bandwidth is not modelled"
        )
    elif command.threads > cores:
        notes.append(f"-t {command.threads}: more than the CPU's {cores} cores; not modelled")
    return command.threads if command.threads < cores else None


def _unmodelled(command: LlamaCommand, places: Places, spec: Scenario, model: ModelSpec, has_card: bool) -> list[str]:
    """What a scenario has no counterpart for, in one line each."""
    out = []
    if not command.kv_on_gpu and set(places.attention) != {"cpu"}:
        out.append("-nkvo: a scenario keeps the K/V cache with attention; the GPU's memory is overstated by it, and attention is too fast")
    if command.split_mode in ("row", "tensor", "graph", "attn"):
        out.append(f"-sm {command.split_mode}: cards that share a layer are not modelled; layers are divided as -sm layer does")
    if has_card and "cpu" in places.attention and command.engine == MAINLINE and command.copies_experts and command.prompt >= 32:
        out.append(
            "prompts: llama.cpp also copies the layers that lie in main memory to the GPU from 32 tokens on; here the CPU computes them"
        )
    if places.attention[0] == "cpu" and places.head != "cpu":
        out.append("-ngl: the compute buffer is counted where layer 0 runs, in main memory")
    if command.tool == BENCH and command.prompt and command.generate:
        out.append(
            f"llama-bench: pp and tg are tests of their own; here decode starts at a depth of {command.depth + command.prompt} tokens"
        )
    if command.cache_v[:1] in ("q", "i") and command.flash is False:
        out.append("-ctv: llama.cpp refuses a quantised V cache without -fa")
    if command.flash is not None:
        out.append(f"-fa {int(command.flash)}: sets the compute buffer; what it does to speed is left to the machine's profile")
    if command.repack:
        out.append("-rtr: weights are repacked at load, so nothing is mapped; faster CPU kernels are left to the machine's profile")
    if command.context == 0 and command.tool != BENCH and model.max_context is None:
        out.append(f"-c 0: the context of {model.name} is not known; {spec.memory.context_tokens} tokens are planned, what the run reaches")
    if command.context is None and command.tool != BENCH:
        out.append(f"-c: not stated; {spec.memory.context_tokens} tokens are planned, what the run reaches")
    return out


def _from_file(precision: Any) -> bool:
    return precision == "file" or isinstance(precision, dict) and precision.get("default") == "file"


# ---- back


def to_flags(case: Case, tool: str = "llama-cli", engine: str = MAINLINE, model: str = "") -> list[str]:
    """Return the words of the command line that runs a case as it is laid out.

    Parameters
    ----------
    case : Case
    tool : str
        One of ``llama_options.TOOLS``.
    engine : str
        ``llama.cpp`` or ``ik_llama.cpp``, whose count of GPU layers differs.
    model : str
        The file that ``-m`` names; empty: the scenario's own where that is a GGUF file, else a placeholder.

    Raises
    ------
    InputError
        If the layout has no counterpart: devices other than CPU and GPUs, or an output layer apart from the last layers.
    """
    layout, scenario, work = case.layout, case.scenario, case.scenario.workload
    strange = {*layout.attention_device, *layout.expert_device} - {"cpu", *_cards(case.hardware)}
    if strange:
        raise InputError("placement", expected="devices that llama.cpp computes on: CPU and GPUs", got=", ".join(sorted(strange)))
    file = model or (scenario.model if scenario.model.endswith(".gguf") else f"{scenario.model}.gguf")
    words = [tool, "-m", file, *_where(layout, engine, tool == BENCH)]
    k, v = (cache_type(case.plan.format("kv", 0, m).name) for m in ("k", "v"))
    if (k, v) != (LOSSLESS, LOSSLESS):
        words += ["-fa", "1" if tool == BENCH else "on", "-ctk", k, "-ctv", v]
    words += ["-ub", str(work.prefill_chunk)]
    if work.prefill_chunk > 2048:
        words += ["-b", str(work.prefill_chunk)]
    pool = layout.pools.get(layout.main_tier)
    if pool is not None and pool.spec.hold == "all":
        words += ["-mmp", "0"] if tool == BENCH else ["--no-mmap"]
    if engine == FORK and isinstance(case.model.attention, MlaAttention):
        words += ["-mla", "3" if scenario.memory.mla_compressed else "0"]
    if tool == BENCH:
        return [*words, "-p", str(work.prompt_tokens), "-n", str(work.output_tokens), "-d", str(work.cached_tokens)]
    words += ["-c", str(layout.context_tokens * work.batch), *(["-np", str(work.batch)] if work.batch > 1 else [])]
    return words if tool == "llama-server" else [*words, "-n", str(work.output_tokens)]


def _where(layout: Layout, engine: str, bench: bool) -> list[str]:
    """Layers on the GPU, cards, and exceptions."""
    model, attention, n = layout.model, layout.attention_device, layout.model.n_layers
    devices = [*attention, layout.head_device]
    first = next((i for i, device in enumerate(devices) if device != "cpu"), n + 1)
    if layout.head_device == "cpu" and first < n and engine == MAINLINE:
        raise InputError(
            "placement.attention", expected="an output layer on the GPU with the last layers", got="cpu", fix="choose --engine ik_llama.cpp"
        )
    held = n + 1 - first if engine == MAINLINE or first == 0 or first > n else n - first + (first == n)
    words = ["-ngl", str(held)]
    cards = [name for name in layout.hardware.devices if kind(name) == "gpu"]
    own = ["cpu"] * first
    for device in devices[first:]:
        own.append(own[-1] if device == "cpu" and len(own) > first else device)
    if any(cards.index(a) > cards.index(b) for a, b in pairwise(own[first:])):
        raise InputError("placement.layers", expected="layers on the cards in their order", got=", ".join(dict.fromkeys(own[first:])))
    counts = [own[: n + (layout.head_device != "cpu")].count(card) for card in cards]
    if held and len(cards) > 1:
        words += ["-ts", ("/" if bench else ",").join(map(str, counts))]
    moved: dict[str, Mapping[int, str]] = {
        r"attn_": {i: d for i, d in enumerate(attention) if d != own[i]},
        "experts": {i: layout.expert_device[i] for i in model.moe_layers if layout.expert_device[i] != own[i]},
        r"ffn_(up|down|gate)_shexp": {
            i: layout.shared_device[i] for i in model.moe_layers if model.layer_params(i, "shared_expert") and layout.shared_device[i] != own[i]
        },
    }  # fmt: skip
    overrides = []
    for pattern, exceptions in moved.items():
        for device in dict.fromkeys(exceptions.values()):
            layers = [i for i, d in exceptions.items() if d == device]
            if pattern == "experts" and device == "cpu" and (short := _short(model, layers, bench)):
                words += short
                continue
            tensors = EXPERTS_PATTERN.removeprefix(r"\.") if pattern == "experts" else pattern
            overrides.append(
                rf"blk\.({'|'.join(map(str, layers))})\.{tensors}={'CPU' if device == 'cpu' else f'CUDA{cards.index(device)}'}"
            )
    if bench and engine == MAINLINE:
        overrides = [";".join(overrides)] if overrides else []
    return [*words, *(word for override in overrides for word in ("-ot", override))]


def _short(model: ModelSpec, layers: list[int], bench: bool) -> list[str]:
    """The flag for experts of all, or of the first layers on the CPU; [] where it takes a pattern."""
    if layers == list(model.moe_layers) and not bench:
        return ["--cpu-moe"]
    last = layers[-1]
    return ["--n-cpu-moe", str(last + 1)] if layers == [i for i in model.moe_layers if i <= last] else []
