"""Options and lines as people type them: what is read, capped, skipped, or accepted with a note."""

from __future__ import annotations

import pytest

from moesim.config import Document, build
from moesim.llama.flags import Translation, to_flags, to_scenario
from moesim.llama.options import FORK, parse_command
from moesim.scenario import Scenario
from moesim.simulate import make_case

FILE = "Qwen3-30B-A3B-Q4_K_M.gguf"
TWO_CARDS = "2x rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4"


def translated(flags: str, tool: str = "llama-server", hardware: str = "desktop-24gb") -> Translation:
    return to_scenario(parse_command(f"{tool} -m {FILE} {flags}"), hardware)


def test_a_context_of_zero_is_the_models_own() -> None:
    found = translated("-c 0 -np 2")
    assert found.scenario["memory"]["context_tokens"] == 20480  # of 40960 tokens
    assert not any(note.startswith("-c") for note in found.notes)
    assert any(note.startswith("-c: not stated") for note in translated("").notes)


@pytest.mark.parametrize(
    ("tool", "flags", "chunk"),
    [
        ("llama-server", "-ub 4096 -b 4096 -c 1024", 1024),
        ("llama-server", "-ub 4096 -c 65536", 2048),
        ("llama-server", "-ub 4096 -b 4096 -c 1024 -np 4", 1024),
        ("llama-server", "-ub 4096 -b 4096", 4096),
        ("llama-bench", "-ub 2048 -p 512 -n 0", 512),
        ("llama-bench", "-p 0 -n 64 -d 64", 128),
    ],
)
def test_a_micro_batch_is_capped_by_batch_and_context(tool: str, flags: str, chunk: int) -> None:
    found = translated(flags, tool)
    assert found.scenario["workload"]["prefill_chunk"] == chunk
    assert any(note.startswith("-ub 4096: the context has") for note in found.notes) == ("-c 1024" in flags)


def test_in_a_benchmark_a_comma_parts_tests_and_a_slash_shares() -> None:
    said = parse_command(f"llama-bench -m {FILE} -ts 3/1,1/1")
    assert said.tensor_split == (3.0, 1.0) and said.notes == ("-ts 3/1,1/1: several tests; the first, 3/1, is taken",)
    assert parse_command(f"llama-server -m {FILE} -ts 3,1").tensor_split == (3.0, 1.0)
    scenario = to_scenario(said, TWO_CARDS).scenario
    words = to_flags(make_case(build(Scenario, Document(scenario, "test"))), "llama-bench")
    assert words[words.index("-ts") + 1] == "37/12"


@pytest.mark.parametrize(
    "option",
    """--ctx-checkpoints=8|--draft-max 16|--draft 8|-md draft.gguf|--spec-type ngram-mod|-ctkd q8_0|-ctvd q8_0|-devd CUDA0|-ncmoed 4|-otd exps=CPU
--override-kv a.b=int:10|--pooling mean|--defrag-thold 0.1|-dt 0.1|--threads-http 4|--log-file x.log|--props|--models-dir /models|--embeddings
--fit|-fit off|--n-cpu-moe-draft 2|--spec-draft-n-max 4""".replace("\n", "|").split("|"),
)
def test_options_without_a_counterpart_are_noted_and_the_rest_is_read(option: str) -> None:
    said = parse_command(f"llama-server -m {FILE} {option} -c 8192")
    assert said.context == 8192
    (remark,) = said.notes[:-1]
    assert remark.startswith(option.split("=")[0].split()[0])


@pytest.mark.parametrize("option", ["-khad", "-smgs", "-muge", "-sas", "-no-ooae", "-thp", "-vq", "-cuda fusion=1"])
def test_options_of_the_fork_are_noted(option: str) -> None:
    said = parse_command(f"llama-server -m {FILE} {option} -c 8192")
    assert said.context == 8192 and said.engine == FORK and said.notes[0].startswith(option)


def test_a_draft_model_is_noted_as_not_modelled() -> None:
    assert "-md draft.gguf: speculative decoding is not modelled" in parse_command(f"llama-cli -m {FILE} -md draft.gguf").notes


@pytest.mark.parametrize("wrapper", ["numactl --interleave=all", "taskset -c 0-15", "env A=1", "A=1 numactl -N 0 -m 0", "sudo nice -n 5"])
def test_what_stands_before_the_tool_is_skipped_with_a_note(wrapper: str) -> None:
    said = parse_command(f"{wrapper} ./bin/llama-cli -m {FILE} -ngl 7")
    assert said.gpu_layers == 7 and any("not read" in note for note in said.notes)


@pytest.mark.parametrize("joint", [" \\\n  ", " \\  \n  ", " \\\r\n  ", " \\ "])
def test_the_backslashes_of_a_line_over_several_are_skipped(joint: str) -> None:
    said = parse_command(joint.join((f"llama-cli -m {FILE}", "-ngl 7", "-c 4096")) + " \\")
    assert (said.model, said.gpu_layers, said.context) == (FILE, 7, 4096)
    assert parse_command("llama-cli -m my\\ model.gguf").model == "my model.gguf"


def test_a_pattern_that_matches_nothing_is_noted() -> None:
    notes = translated("-ot 'ffn_.*_shexp=CPU,exps=CPU'").notes
    assert [note for note in notes if "matches no tensor" in note] == [
        "-ot ffn_.*_shexp=CPU: matches no tensor of qwen3-30b-a3b, so nothing is moved"
    ]
    assert not any("matches no tensor" in note for note in translated("-ncmoe 60 -ot 'attn_k_norm=CPU'").notes)
