"""Command lines of llama.cpp: what is read, what is refused, where tensors lie, round trips, the search for flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_writer
import pytest
import yaml

from moesim.cli.main import run
from moesim.config import Document, build
from moesim.errors import DoesNotFit, InputError
from moesim.layout import Layout
from moesim.llama.flags import to_flags, to_scenario
from moesim.llama.options import FORK, MAINLINE, parse_command
from moesim.llama.quants import quant_of, spans
from moesim.llama.suggest import suggest
from moesim.scenario import Scenario
from moesim.simulate import Case, load_case, make_case

FILE = "Qwen3-30B-A3B-Q4_K_M.gguf"
TWO_CARDS = "2x rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4"


def case_of(line: str, hardware: str = "desktop-24gb", model: str = "") -> Case:
    return make_case(build(Scenario, Document(to_scenario(parse_command(line), hardware, model).scenario, "test")))


def places(line: str, hardware: str = "desktop-24gb") -> Layout:
    return case_of(line, hardware).layout


def test_options_are_read_with_their_short_and_long_names() -> None:
    line = f"CUDA_VISIBLE_DEVICES=0 ./build/bin/llama-server -m {FILE} --n-gpu-layers 20 -ctk q8_0 --cache-type-v=q4_0 -c 8192 -np 4 --no-mmap -fa"
    said = parse_command(line)
    assert (said.tool, said.engine, said.gpu_layers, said.cache_k, said.cache_v) == ("llama-server", MAINLINE, 20, "q8_0", "q4_0")
    assert (said.context, said.parallel, said.mapped, said.flash) == (8192, 4, False, True)
    assert "CUDA_VISIBLE_DEVICES=0: environment variables are not read" in said.notes


def test_the_first_of_a_benchmarks_tests_is_taken_and_said() -> None:
    said = parse_command(f"llama-bench -m {FILE} -p 512,2048 -n 32 -n 64 -t 8-16+4 -mmp 0 -fa 0,1")
    assert (said.prompt, said.generate, said.threads, said.mapped, said.flash) == (512, 32, 8, False, False)
    assert [note.split(":")[0] for note in said.notes] == ["-p 512,2048", "-n 64", "-t 8-16+4", "-fa 0,1"]


def test_options_of_the_fork_tell_the_engine() -> None:
    assert parse_command(f"llama-cli -m {FILE} -fmoe -rtr -mla 3").engine == FORK
    assert not parse_command(f"llama-cli -m {FILE} -rtr").mapped
    assert parse_command(f"llama-cli -m {FILE} -mla 0", MAINLINE).engine == MAINLINE


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("llama-bnch -m x", 'did you mean "llama-bench"'),
        ("", "begins with a tool"),
        ("llama-cli -m x --n-cpu-mo 3", 'did you mean "--n-cpu-moe"'),
        ("llama-cli -m", "the end of the line"),
        ("llama-cli -m x -ngl many", "a whole number"),
        ("llama-cli -m x -ot exps", "pattern=buffer"),
        ("llama-cli -m x -ot '(=CPU'", "a regular expression"),
        ("llama-cli -m 'x", "closed quotes"),
        ("llama-cli -m x -ctk q9", "one of those known"),
        ("llama-cli -m x -ts 1,-3", "shares"),
        ("llama-cli -m x -ub 0", "a whole number from 1"),
        ("llama-cli -m x -ncmoe 99999", "from 0 to 999"),
    ],
)
def test_wrong_lines_are_refused_with_a_fix(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        parse_command(line)


def test_layers_lie_where_llama_cpp_puts_them() -> None:
    """Of 48 layers and the output layer the last ``ngl`` lie on the GPU; the fork counts the output layer last."""
    layout = places(f"llama-cli -m {FILE} -ngl 10")
    assert (layout.attention_device.index("gpu"), layout.head_device, layout.expert_device[39]) == (39, "gpu", "gpu")
    fork = places(f"llama-cli -m {FILE} -ngl 10 -fmoe")
    assert (fork.attention_device.index("gpu"), fork.head_device) == (38, "cpu")
    assert set(places(f"llama-cli -m {FILE} -ngl 0").attention_device) == {"cpu"}
    assert set(places(f"llama-cli -m {FILE}").attention_device) == {"gpu"}


def test_patterns_move_experts_and_the_first_that_matches_decides() -> None:
    moved = places(f"llama-cli -m {FILE} --n-cpu-moe 20").expert_device
    assert moved == ["cpu"] * 20 + ["gpu"] * 28
    line = rf"llama-cli -m {FILE} -ot 'blk\.(1|2)\.ffn_.*_exps=CUDA0,exps=CPU'"
    chosen = places(line)
    assert [i for i, device in enumerate(chosen.expert_device) if device == "gpu"] == [1, 2]
    assert set(chosen.attention_device) == {"gpu"}
    assert set(places(f"llama-cli -m {FILE} -cmoe").expert_device) == {"cpu"}


def test_parted_tensors_follow_the_most_of_them_and_a_note_says_so() -> None:
    found = to_scenario(parse_command(rf"llama-cli -m {FILE} -ot 'ffn_(up|gate)_exps=CPU'"), "desktop-24gb")
    assert any(note.startswith("-ot: tensors of a layer's routed experts are parted") for note in found.notes)
    assert found.scenario["placement"]["layers"] == [{"layers": "0-47", "part": "routed_experts", "device": "cpu"}]


def test_layers_are_divided_among_cards_by_their_shares() -> None:
    layout = places(f"llama-cli -m {FILE} -ts 3,1", TWO_CARDS)
    assert (layout.attention_device.count("gpu"), layout.attention_device.count("gpu1"), layout.head_device) == (37, 11, "gpu1")
    assert set(places(f"llama-cli -m {FILE} -sm none -mg 1", TWO_CARDS).attention_device) == {"gpu1"}
    with pytest.raises(InputError, match="at most 2 shares"):
        places(f"llama-cli -m {FILE} -ts 1,1,1", TWO_CARDS)
    with pytest.raises(InputError, match="a buffer of this machine"):
        places(f"llama-cli -m {FILE} -ot exps=CUDA1")


def test_formats_context_and_buffers_go_into_the_plan() -> None:
    case = case_of(f"llama-server -m {FILE} -c 10000 -np 2 -ctk q8_0 -ctv q4_0 -fa on -ub 256 --mlock")
    assert [case.plan.format("kv", 0, m).name for m in ("k", "v")] == ["Q8_0", "Q4_0"]
    assert case.layout.context_tokens == 5120  # 10000 / 2, up to a multiple of 256
    assert case.scenario.workload.batch == 2 and case.scenario.workload.prefill_chunk == 256
    model = case.model
    assert case.scenario.memory.workspace == 256 * (model.vocab_size + 2 * model.hidden_size) * 4
    assert case.plan.format("routed_experts", 0).name in ("Q4_K", "Q5_K")


@pytest.mark.parametrize(
    ("flag", "words"),
    [("-nkvo", "keeps the K/V cache with attention"), ("-sm row", "cards that share a layer"), ("-ngl 20", "copies the layers"), ("--temp 0.7", "no counterpart")],
)  # fmt: skip
def test_what_has_no_counterpart_is_noted(flag: str, words: str) -> None:
    assert any(words in note for note in to_scenario(parse_command(f"llama-cli -m {FILE} {flag}"), "desktop-24gb").notes)


def test_large_batches_copy_experts_to_the_gpu_as_llama_cpp_does() -> None:
    """From 32 tokens on, into room for a third of a layer: one of its matrices; not with ``-nopo``, and not by the fork's default rules."""
    case = case_of(f"llama-cli -m {FILE} -ncmoe 20")
    assert case.scenario.placement.stream_from == 32 and case.layout.streamed_to(0) == "gpu" and case.layout.streamed_to(30) == ""
    assert case.layout.pools["vram"].transient_slots == 43 and case.layout.pools["vram"].counts == (0,) * 20 + (128,) * 28
    for line in (f"llama-cli -m {FILE} -ncmoe 20 --no-op-offload", f"llama-cli -m {FILE}"):
        assert case_of(line).scenario.placement.stream_from == "never"


def test_a_file_that_is_here_gives_its_own_formats(tmp_path: Path) -> None:
    path = tmp_path / "small-Q4_K_M.gguf"
    gguf_writer.write(path, "qwen3moe", *gguf_writer.qwen3moe())
    own = case_of(f"llama-cli -m {path} -ncmoe 2")
    assert own.scenario.precision == "file"
    quantised = case_of(f"llama-cli -m {path} -ncmoe 2 -ctk q8_0 -ctv q8_0")
    assert quantised.plan.format("kv", 0, "v").name == "Q8_0" and quantised.plan.format("routed_experts", 0, "down").name == "Q6_K"
    assert own.model.weight_bytes(own.plan) == quantised.model.weight_bytes(quantised.plan)
    assert own.layout.expert_device[:3] == ["cpu", "cpu", "gpu"]


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="name a bundled model with --model"):
        to_scenario(parse_command("llama-cli -m Nothing-9B-Q4_K_M.gguf"), "desktop-24gb")
    with pytest.raises(InputError, match="a file name that states one"):
        to_scenario(parse_command("llama-cli -m olmoe-1b-7b.gguf"), "desktop-24gb")
    assert quant_of("dir/X-UD-Q4_K_XL-00001-of-00002.gguf") == "UD-Q4_K_XL"
    assert spans([3, 0, 1, 2, 7]) == "0-3, 7"


def placed(case: Case) -> Mapping[str, Any]:
    layout = case.layout
    return {"attention": layout.attention_device, "experts": layout.expert_device, "shared": layout.shared_device, "head": layout.head_device,
            "context": layout.context_tokens, "plan": case.plan, "workspace": case.scenario.memory.workspace, "work": case.scenario.workload,
            "pools": {tier: (pool.spec, pool.counts) for tier, pool in layout.pools.items()}, "mla": case.scenario.memory.mla_compressed}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "hardware", "engine"),
    [
        ("-ngl 99 --n-cpu-moe 20 -fa on -ctk q8_0 -ctv q8_0 -ub 1024 -c 16384", "desktop-24gb", MAINLINE),
        ("-ngl 99 -cmoe --no-mmap -c 4096", "desktop-24gb", MAINLINE),
        ("-ngl 30 -c 4096 -ub 4096 -b 4096", "desktop-24gb", MAINLINE),
        ("-ngl 30 -fmoe -c 4096", "desktop-24gb", FORK),
        ("-ngl 0", "cpu-server", MAINLINE),
        (r"-ot 'blk\.(0|7)\.ffn_.*_exps=CPU,blk\.3\.attn_=CPU'", "desktop-24gb", MAINLINE),
        ("-ts 2,1 -ncmoe 5", TWO_CARDS, MAINLINE),
    ],
)
def test_flags_and_scenarios_turn_into_each_other(flags: str, hardware: str, engine: str) -> None:
    there = case_of(f"llama-cli -m {FILE} {flags}", hardware)
    for tool in ("llama-cli", "llama-server"):
        words = to_flags(there, tool, engine, FILE)
        back = to_scenario(parse_command(words, engine), hardware).scenario
        assert placed(make_case(build(Scenario, Document(back, "test")))) == placed(there), words


def test_a_benchmarks_flags_come_back() -> None:
    there = case_of(rf"llama-bench -m {FILE} -p 1024 -n 32 -d 4096 -ot 'blk\.(2|5)\.ffn_.*_exps=CPU;blk\.3\.attn_=CPU'")
    back = parse_command(to_flags(there, "llama-bench", MAINLINE, FILE))
    assert placed(make_case(build(Scenario, Document(to_scenario(back, "desktop-24gb").scenario, "test")))) == placed(there)
    assert (back.prompt, back.generate, back.depth) == (1024, 32, 4096)


def test_the_command_writes_a_scenario_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "olmoe.yaml"
    line = "llama-bench -m olmoe-1b-7b-Q8_0.gguf -p 32 -n 4 -ncmoe 3"
    assert run(["from-llama", line, "--hardware", "laptop-8gb", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and all(x.startswith("note: ") for x in err.splitlines())
    assert path.read_text().startswith(f"# {line}\n") and yaml.safe_load(path.read_text())["name"] == "olmoe"
    assert run(["run", str(path)]) == 0
    assert run(["from-llama", line, "--hardware", "nothing"]) == 2


def test_the_best_flags_fit_and_need_the_fewest_layers_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tight.yaml"
    line = "llama-cli -m olmoe-1b-7b-Q8_0.gguf -n 8 -c 4096"
    path.write_text(yaml.safe_dump(to_scenario(parse_command(line), "laptop-8gb").scenario))
    case = load_case(path, ("hardware_set.tiers.vram.capacity.value=5 GiB", "workload.prompt_tokens=16"))
    found = suggest(case)
    best = found[0]
    assert all(left >= 0 for left in best.left_bytes.values()) and 0 < best.layers_on_cpu < 16
    one_less = [i for i in best.case.model.moe_layers if best.case.layout.expert_device[i] == "cpu"]
    assert best.left_bytes["vram"] < best.case.model.n_experts * best.case.layout.expert_bytes[one_less[-1]]
    assert {c.kv for c in found} == {"fp16", "Q8_0"} and best.line.startswith("llama-cli -m olmoe-1b-7b.gguf -ngl 17 --n-cpu-moe")
    assert best.line.endswith("-n 8")
    assert run(["suggest-flags", str(path), "--set", "workload.prompt_tokens=16"]) == 0
    assert "--n-cpu-moe" not in capsys.readouterr().out.splitlines()[0]  # 8 GB hold all
    with pytest.raises(DoesNotFit):
        suggest(load_case(path, ("hardware_set.tiers.ram.capacity.value=4200 MiB", "hardware_set.tiers.vram.capacity.value=900 MiB")))


@pytest.mark.parametrize(("scenario", "machine"), [("qwen3-30b-desktop", "cpu-server"), ("qwen3-30b-two-gpus", "strix-halo")])
def test_flags_are_searched_on_a_machine_that_lacks_what_the_scenario_names(
    scenario: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "workload.prompt_tokens=8", "--set", "workload.output_tokens=2"]
    assert run(["suggest-flags", scenario, "--hardware", machine, *short]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("llama-cli -m qwen3-30b-a3b.gguf -ngl") and "the scenario's placement is left out" in err
    assert run(["suggest-flags", scenario, "--hardware", "no-such-machine"]) == 2
