"""Owns the command lines of llama.cpp and ik_llama.cpp: which options there are, what each takes, and what a line says.

It must not know scenarios. Options that set how a model is placed or run are read into ``LlamaCommand``; options that change neither speed
nor memory in this program's model are named in its notes; an unknown option is refused. Of lists that ``llama-bench`` takes for several
tests the first value is used, and a note says so. Names and defaults: llama.cpp, tools/llama-bench/README.md and common/arg.cpp;
ik_llama.cpp, common/common.cpp.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from moesim.errors import InputError, did_you_mean
from moesim.llama import option_names as known

TOOLS = ("llama-bench", "llama-cli", "llama-completion", "llama-server", "llama-sweep-bench")
BENCH = "llama-bench"
MAINLINE, FORK = "llama.cpp", "ik_llama.cpp"
ALL_LAYERS = 999
MAX_PATTERN = 1000  # characters of a tensor pattern
EXPERTS_PATTERN = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # what -cmoe and -ncmoe stand for

_NAMES = {name: field for table in (known.VALUES, known.FLAGS) for field, names in table.items() for name in names.split()}
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|(?:^|(?<=\s))\\(?=\s|$)|\\\s*\Z")  # a backslash that ends a line, also of lines that were joined
_STATES = {"0": False, "off": False, "false": False, "1": True, "on": True, "true": True, "auto": None}
_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_WITH_VALUE = {*known.DRAFT_VALUES, *known.OTHER_VALUES}
_UNREAD = {*_WITH_VALUE, *known.DRAFT_FLAGS, *known.OTHER_FLAGS}
_DRAFT = {*known.DRAFT_VALUES, *known.DRAFT_FLAGS}
_WRAPPERS = ("env", "numactl", "taskset", "nice", "ionice", "chrt", "sudo", "nohup", "time", "stdbuf", "exec", "setarch", "systemd-run")
_RANGE = re.compile(r"(\d+)-\d+([+*]\d+)?")


@dataclass(frozen=True, slots=True)
class LlamaCommand:
    """What a command line says. ``overrides`` are (pattern, buffer) in order, the first that matches a tensor's name decides.

    ``gpu_layers`` counts the output layer as one more than the model has; None is all. ``context``, ``threads``, ``flash``, ``mla`` are None
    where not stated; a context of 0 tokens is the model's own.
    """

    tool: str
    engine: str
    model: str = ""
    gpu_layers: int | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    ubatch: int = 512
    batch: int = 2048
    kv_on_gpu: bool = True
    mapped: bool = True
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    flash: bool | None = None
    cache_k: str = "f16"
    cache_v: str = "f16"
    context: int | None = None
    prompt: int = 512
    generate: int = 128
    depth: int = 0
    threads: int | None = None
    parallel: int = 1
    repack: bool = False
    mla: int | None = None
    copies_experts: bool = True
    notes: tuple[str, ...] = ()


def parse_command(line: str | Iterable[str], engine: str = "") -> LlamaCommand:
    """Read a command line.

    Parameters
    ----------
    line : str or iterable of str
        The line as one would type it, or its words.
    engine : str
        ``llama.cpp`` or ``ik_llama.cpp``; empty: the fork where an option is used that only it has.

    Raises
    ------
    InputError
        For an unknown tool or option, a missing or wrong value.
    """
    words = _words(line)
    notes: list[str] = []
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        notes.append(f"{words.pop(0)}: environment variables are not read")
    if words and _name(words[0]) in _WRAPPERS:
        start = next((i for i, word in enumerate(words) if _name(word) in TOOLS), 0)
        notes += [f"{' '.join(words[:start])}: what stands before the tool is not read"] if start else []
        words = words[start:]
    tool = _name(words.pop(0)) if words else ""
    if tool not in TOOLS:
        fix = did_you_mean(tool, TOOLS)
        raise InputError("command line", expected="a line that begins with a tool of llama.cpp", got=f'"{tool[:60]}"', fix=fix)
    found = list(_read(words, tool))
    fork = any(field in known.FORK_FIELDS or name in known.FORK_NAMES for name, field, _ in found)
    if engine not in ("", MAINLINE, FORK):
        raise InputError("--engine", expected=f"{MAINLINE} or {FORK}", got=f'"{engine}"', fix=did_you_mean(engine, (MAINLINE, FORK)))
    engine = engine or (FORK if fork or tool == "llama-sweep-bench" else MAINLINE)
    return _command(tool, engine, found, notes)


def _name(word: str) -> str:
    """The name of a program, without its folder."""
    return PurePosixPath(word.replace("\\", "/")).name.removesuffix(".exe")


def _words(line: str | Iterable[str]) -> list[str]:
    if not isinstance(line, str):
        return list(line)
    try:
        return shlex.split(_CONTINUED.sub(" ", line))
    except ValueError as error:
        raise InputError("command line", expected="closed quotes", got=str(error).lower()) from None


def _read(words: list[str], tool: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, field, value) of each option; field "" where it has no counterpart."""
    names = dict(_NAMES)
    for prompt in ("-p", "--prompt"):
        names[prompt] = "prompt" if tool == BENCH else "text"
    i = 0
    while i < len(words):
        name, sign, value = words[i].partition("=") if words[i].startswith("--") else (words[i], "", "")
        field, i = names.get(name, ""), i + 1
        if not field and name not in _UNREAD:
            raise InputError(
                f"option {name[:60]}", expected=f"an option of {tool}", got="an unknown one", fix=_near(name, [*names, *_UNREAD])
            )
        takes = field in known.VALUES or field == "text" or name in _WITH_VALUE
        if takes and not sign:
            if i == len(words):
                raise InputError(f"option {name}", expected="a value", got="the end of the line")
            value, i = words[i], i + 1
        elif not takes and not sign and i < len(words) and words[i].split(",")[0].lower() in _STATES:
            value, i = words[i], i + 1
        yield name, field, value


def _near(name: str, others: list[str]) -> str:
    return did_you_mean(name, others).partition("known: ")[0].strip() or "moesim from-llama knows llama-bench, llama-cli, llama-server"


def _command(tool: str, engine: str, found: list[tuple[str, str, str]], notes: list[str]) -> LlamaCommand:
    """Return what the options say, the last of each but for those that add up; in llama-bench the first."""
    bench = tool == BENCH
    said: dict[str, tuple[str, str]] = {}
    overrides: list[tuple[str, str]] = []
    seen_override = False
    for name, field, value in found:
        if not field:
            why = "speculative decoding is not modelled" if name in _DRAFT else "no counterpart, left out"
            notes.append(f"{name}{' ' + value if value else ''}: {why}")
        elif field == "override":
            if not (bench and seen_override):
                overrides += _overrides(name, value, bench and engine == MAINLINE, notes)
            seen_override = True
        elif field == "cpu_moe":
            overrides += [(EXPERTS_PATTERN, "CPU")] if _state(name, value) else []
        elif field == "n_cpu_moe":
            first = _first(name, value, bench, notes)
            overrides += [(rf"blk\.{i}{EXPERTS_PATTERN}", "CPU") for i in range(_whole(name, first, most=ALL_LAYERS))]
        elif bench and field in said:
            notes.append(f"{name} {value}: a further test; only the first is taken")
        else:
            keeps = field in ("text", "model", "hf_repo", "hf_file", "pair")
            said[field] = name, value if keeps else _first(name, value, bench, notes)
    return _typed(tool, engine, said, tuple(overrides), notes)


def _first(name: str, value: str, bench: bool, notes: list[str]) -> str:
    """The first of several values that llama-bench runs one after the other."""
    first = value.split(",")[0] if bench else value
    if bench and (match := _RANGE.fullmatch(first)):
        first = match[1]
    if first != value:
        notes.append(f"{name} {value}: several tests; the first, {first}, is taken")
    return first


def _overrides(name: str, value: str, bench: bool, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (pattern, buffer) pairs; llama-bench parts pairs by ; and tests by a comma, the other tools pairs by a comma."""
    if bench:
        value = _first(name, value, True, notes)
    for pair in value.split(";" if bench else ","):
        pattern, sign, buffer = pair.rpartition("=")
        try:
            if not sign or not pattern or not buffer or len(pattern) > MAX_PATTERN:
                raise InputError(f"option {name}", expected="pattern=buffer, as in exps=CPU", got=f'"{pair[:80]}"')
            re.compile(pattern)
        except re.error as error:
            raise InputError(f"option {name}", expected="a regular expression", got=f'"{pattern[:80]}" ({error})') from None
        yield pattern, buffer


def _typed(
    tool: str, engine: str, said: dict[str, tuple[str, str]], overrides: tuple[tuple[str, str], ...], notes: list[str]
) -> LlamaCommand:
    def whole(field: str, default: int, least: int = 0) -> int:
        return _whole(*said[field], least=least) if field in said else default

    def state(field: str) -> bool | None:
        return _state(*said[field]) if field in said else None

    mapped = state("mmap") is not False and not state("no_mmap") and not state("repack") and not state("mlock")
    if "load_mode" in said:
        mapped = said["load_mode"][1] in ("auto", "mmap")
    prompt, generate, depth = whole("prompt", 512), _generate(said), whole("depth", 0)
    if "pair" in said:
        prompt, generate = _pair(*said["pair"])
    if "text" in said:
        notes.append(f"{said['text'][0]}: a prompt's text is not tokenised; 512 tokens are assumed (--set workload.prompt_tokens=N)")
    if tool == "llama-server":
        notes.append("llama-server: requests are not on the line; a prompt of 512 tokens and an answer of 128 are assumed")
    for field in ("fused_moe", "no_fused_moe"):
        if field in said:
            notes.append(f"{said[field][0]}: kernels that run gate, up and activation as one are not modelled apart")
    main = whole("main_gpu", 0)
    return LlamaCommand(
        tool=tool, engine=engine, model=_model(said), gpu_layers=_layers(said), overrides=overrides, ubatch=whole("ubatch", 512, 1),
        batch=whole("batch", 2048, 1), kv_on_gpu=not state("no_kv_offload"), mapped=mapped,
        split_mode=_choice(said, "split_mode", ("layer", "none", "row", "tensor", "graph", "attn")), tensor_split=_split(said), main_gpu=main,
        flash=False if state("no_flash") else state("flash"), cache_k=_choice(said, "cache_k", ("f16", *_KV_TYPES)),
        cache_v=_choice(said, "cache_v", ("f16", *_KV_TYPES)), context=whole("context", 0) if "context" in said else None, prompt=prompt, generate=generate, depth=depth,
        threads=whole("threads", 0) if said.get("threads", ("", "-1"))[1] != "-1" else None, parallel=_parallel(said),
        repack=bool(state("repack")), mla=whole("mla", 0) if "mla" in said else None, copies_experts=not state("no_op_offload"),
        notes=tuple(notes),
    )  # fmt: skip


def _whole(name: str, value: str, least: int = 0, most: int = 2**31) -> int:
    if not re.fullmatch(r"\d{1,10}", value) or not least <= int(value) <= most:
        raise InputError(f"option {name}", expected=f"a whole number from {least} to {most}", got=f'"{value[:40]}"')
    return int(value)


def _state(name: str, value: str) -> bool | None:
    state = value.split(",")[0].lower()
    if state and state not in _STATES:
        raise InputError(f"option {name}", expected="on, off, 1, 0 or nothing", got=f'"{value[:40]}"')
    return _STATES[state] if state else True


def _choice(said: dict[str, tuple[str, str]], field: str, choices: tuple[str, ...]) -> str:
    """A value of a few; the first where none is stated."""
    name, value = said.get(field, ("", choices[0]))
    if value.lower() not in choices:
        raise InputError(f"option {name}", expected="one of those known", got=f'"{value[:40]}"', fix=did_you_mean(value, set(choices)))
    return value.lower()


def _generate(said: dict[str, tuple[str, str]]) -> int:
    name, value = said.get("generate", ("-n", "128"))
    return 128 if value in ("-1", "-2") else _whole(name, value)


def _parallel(said: dict[str, tuple[str, str]]) -> int:
    name, value = said.get("parallel", ("-np", "1"))
    return 1 if value == "-1" else max(_whole(name, value), 1)


def _layers(said: dict[str, tuple[str, str]]) -> int | None:
    name, value = said.get("gpu_layers", ("-ngl", "-1"))
    return None if value in ("-1", "-2", "auto", "all") else _whole(name, value)


def _pair(name: str, value: str) -> tuple[int, int]:
    prompt, sign, generate = value.partition(",")
    if not sign:
        raise InputError(f"option {name}", expected="prompt,answer as in 512,128", got=f'"{value[:40]}"')
    return _whole(name, prompt), _whole(name, generate)


def _split(said: dict[str, tuple[str, str]]) -> tuple[float, ...]:
    name, value = said.get("tensor_split", ("", ""))
    try:
        parts = tuple(float(part) for part in re.split(r"[,/;]", value)) if value else ()
    except ValueError:
        parts = (-1.0,)
    if any(not 0 <= part < 1e9 for part in parts):
        raise InputError(f"option {name}", expected="shares as in 3,1", got=f'"{value[:40]}"')
    return parts if sum(parts) > 0 else ()


def _model(said: dict[str, tuple[str, str]]) -> str:
    if "model" in said:
        return said["model"][1]
    repo, _, quant = said.get("hf_repo", ("", ""))[1].partition(":")
    name = repo.rsplit("/", 1)[-1].removesuffix("-GGUF")
    return said["hf_file"][1] if "hf_file" in said else f"{name}-{quant or 'Q4_K_M'}.gguf" if name else ""
