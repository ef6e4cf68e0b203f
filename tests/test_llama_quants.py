"""Names of quantisations: which are known, what they say of a model's parts, and a precision stated by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.llama.flags import to_scenario
from moesim.llama.options import parse_command
from moesim.llama.quants import MIXES, mixed, precision_of, quant_of
from moesim.model_files import load_model
from moesim.precision import plan_from

LLAMA = """Q2_K Q2_K_S Q3_K Q3_K_S Q3_K_M Q3_K_L Q4_0 Q4_1 Q4_K Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K Q5_K_S Q5_K_M Q6_K Q8_0 IQ1_S IQ1_M IQ2_XXS
IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 MXFP4_MOE BF16 F16 F32 Q4_K_L Q3_K_XL""".split()
DYNAMIC = (
    "UD-IQ1_S UD-IQ1_M UD-IQ2_XXS UD-IQ2_M UD-IQ3_XXS UD-Q2_K_XL UD-Q3_K_XL UD-Q4_K_XL UD-Q5_K_XL UD-Q6_K_XL UD-Q8_K_XL UD-TQ1_0".split()
)
FORK = "IQ2_K IQ2_KS IQ2_KL IQ3_K IQ3_KS IQ4_K IQ4_KS IQ4_KSS IQ5_K IQ5_KS IQ6_K IQ2_KT IQ3_KT IQ4_KT IQ4_K_R4 Q4_0_R8".split()


def said(model: str, quant: str) -> tuple[dict[str, Any], str, float]:
    spec = load_model(model)
    found = precision_of(spec, quant, "fp16")
    assert found is not None
    plan = plan_from(found[0])
    return *found, spec.weight_bytes(plan) * 8 / spec.params_total


@pytest.mark.parametrize("quant", [*LLAMA, *DYNAMIC, *FORK])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
def test_every_name_is_found_in_a_files_name_and_makes_a_plan(model: str, quant: str) -> None:
    assert quant_of(f"dir/{model}-{quant}-00001-of-00003.gguf") == quant
    _, note, bits = said(model, quant)
    assert 1.5 < bits < 33 and (note.startswith(f"{quant}: ") or quant in ("MXFP4", "MXFP4_MOE", "BF16", "F16", "F32"))


@pytest.mark.parametrize(
    ("quant", "median"), [("Q4_K_M", 4.83), ("Q5_K_M", 5.69), ("Q6_K", 6.57)]
)  # fmt: skip
def test_the_rules_of_llama_cpp_give_the_size_of_public_files(quant: str, median: float) -> None:
    model = load_model("qwen3-30b-a3b")
    plan = plan_from(mixed(model, quant, MIXES[quant]))
    assert model.weight_bytes(plan) * 8 / model.params_total == pytest.approx(median, rel=0.01)


def test_a_mix_gives_more_to_some_matrices_of_some_layers() -> None:
    plan = plan_from(said("qwen3-30b-a3b", "Q4_K_S")[0])
    assert [plan.format("routed_experts", i, "down").name for i in (5, 6)] == ["Q5_K", "Q4_K"]
    assert [plan.format("attention", i, "v").name for i in (3, 4)] == ["Q5_K", "Q4_K"] and plan.format("head").name == "Q6_K"
    eight = plan_from(said("mixtral-8x7b", "IQ3_S")[0])
    assert [eight.format("attention", 0, m).name for m in "qkvo"] == ["IQ3_S", "Q8_0", "Q8_0", "Q5_K"]


def test_a_name_of_the_fork_gives_its_nominal_bits_to_the_experts_and_says_so() -> None:
    data, note, _ = said("qwen3-30b-a3b", "IQ2_KS")
    assert "2.1875 bits per weight for the routed experts" in note and "not modelled" in note
    model, plan = load_model("qwen3-30b-a3b"), plan_from(data)
    experts = sum(model.layer_params(i, "routed_experts") for i in model.moe_layers)
    assert model.part_bytes(plan, "routed_experts") * 8 / experts == pytest.approx(2.1875, rel=0.01)


def test_a_name_that_states_none_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="--precision"):
        to_scenario(parse_command("llama-cli -m olmoe-1b-7b-Q9_Z.gguf"), "desktop-24gb")
    assert precision_of(load_model("olmoe-1b-7b"), "IQ9_K", "fp16") is None


@pytest.mark.parametrize(("stated", "experts"), [("Q5_K", "Q5_K"), ("{default: Q8_0, routed_experts: iq2_xs}", "IQ2_XS")])
def test_a_precision_is_stated_by_hand(tmp_path: Path, stated: str, experts: str) -> None:
    path = tmp_path / "run.yaml"
    line = "llama-cli -m olmoe-1b-7b.gguf -ctk q8_0 -ctv q4_0"
    assert run(["from-llama", line, "--hardware", "laptop-8gb", "--precision", stated, "-o", str(path)]) == 0
    plan = plan_from(yaml.safe_load(path.read_text())["precision"])
    assert plan.format("routed_experts", 0).name == experts
    assert [plan.format("kv", 0, m).name for m in "kv"] == ["Q8_0", "Q4_0"]


def test_a_wrong_precision_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = "llama-cli -m olmoe-1b-7b.gguf"
    for wrong in ("Q4_Z", "{default: [", "{parts: Q4_K}"):
        assert run(["from-llama", line, "--hardware", "laptop-8gb", "--precision", wrong]) == 2
        assert "precision" in capsys.readouterr().err
