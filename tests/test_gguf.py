"""GGUF headers: planned bytes equal the bytes of the tensors, whatever the mixture of types; damaged files are refused at their byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf")

import gguf  # noqa: E402
from gguf_writer import Q, deepseek2, qwen3moe, write  # noqa: E402

from moesim.architecture import FullAttention, LinearAttention, MlaAttention  # noqa: E402
from moesim.errors import InputError  # noqa: E402
from moesim.model_files import load_model, load_model_with_plan  # noqa: E402
from moesim.model_files.gguf_header import TYPES, read_header  # noqa: E402
from moesim.precision import get_format  # noqa: E402


def planned(path: Path) -> int:
    model, plan = load_model_with_plan(path)
    assert plan is not None
    plan.check_layers(model.n_layers)
    return model.weight_bytes(plan)


def test_type_numbers_equal_the_reference_table() -> None:
    ours = {number: name.lower() for number, name in TYPES.items()}
    theirs = {int(kind): kind.name.lower() for kind in gguf.GGMLQuantizationType}
    assert ours == theirs
    assert all(get_format(name) for name in TYPES.values())


def test_qwen3moe_header_only(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    total = write(path, "qwen3moe", *qwen3moe())
    assert read_header(path).header_bytes == path.stat().st_size  # nothing behind the infos, and nothing is missed
    model, plan = load_model_with_plan(path)
    assert plan is not None and planned(path) == total
    assert (model.name, model.n_layers, model.hidden_size, model.n_experts, model.top_k, model.vocab_size) == (
        "Small Qwen",
        6,
        256,
        8,
        2,
        512,
    )
    assert model.moe_layers == tuple(range(6)) and not model.tied_embeddings and model.max_context == 4096
    assert model.attention_at(3) == FullAttention(kind="full", n_heads=8, n_kv_heads=2, head_dim=64)
    assert model.kv_bytes_per_token(plan, 0) == 2 * 2 * 64 * 2
    q4, q6 = 256 * 144, 256 * 210
    assert model.expert_matrix_bytes(plan, 0) == {"gate": q4, "up": q4, "down": q6}
    assert model.expert_matrix_bytes(plan, 3) == {"gate": q4, "up": q4, "down": q4}
    assert plan.format("attention", 5, "v").name == "Q6_K" and plan.format("attention", 4, "v").name == "Q4_K"
    assert plan.format("head").name == "Q6_K" and plan.format("norms").name == "F32" and plan.format("kv").name == "fp16"


def test_a_file_with_data_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, "qwen3moe", *qwen3moe())
    before = load_model(path)
    path.write_bytes(path.read_bytes() + bytes(100_000))
    assert load_model(path) == before


@pytest.mark.parametrize("split_kv_b", [True, False])
def test_deepseek2_with_dense_layer_shared_expert_and_mla(tmp_path: Path, split_kv_b: bool) -> None:
    path = tmp_path / "d.gguf"
    total = write(path, "deepseek2", *deepseek2(split_kv_b=split_kv_b))
    model, plan = load_model_with_plan(path)
    assert plan is not None and planned(path) == total
    assert model.moe_layers == (1, 2, 3) and model.tied_embeddings
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    assert model.attention_at(0) == MlaAttention(kind="mla", n_heads=4, q_lora_rank=128, **latent)
    assert model.kv_bytes_per_token(plan, 0) == (64 + 16) * 2
    assert model.layer_params(0, "dense_ffn") == 3 * 512 * 256 and model.layer_params(1, "shared_expert") == 3 * 256 * 256
    assert model.expert_matrix_bytes(plan, 1) == {"gate": 256 * 66, "up": 256 * 66, "down": 256 * 84}
    assert model.head_bytes(plan) == 512 * 144


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.gguf", "deepseek2", *deepseek2())
    more = write(tmp_path / "mtp.gguf", "deepseek2", *deepseek2(mtp=True))
    assert more > plain == planned(tmp_path / "mtp.gguf")
    assert load_model(tmp_path / "mtp.gguf").n_layers == 4


def test_gpt_oss_biases_windows_and_mxfp4(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(n_layers=4)
    metadata["attention.sliding_window"] = 128
    for i in range(4):
        for name, width in (("gate", 256), ("up", 256), ("down", 256)):
            tensors[f"blk.{i}.ffn_{name}_exps.weight"] = ((8, width, 256), Q.MXFP4)
            tensors[f"blk.{i}.ffn_{name}_exps.bias"] = ((8, width), Q.F32)
        tensors[f"blk.{i}.attn_sinks.weight"] = ((8,), Q.F32)
        tensors[f"blk.{i}.attn_q.bias"] = ((512,), Q.F32)
    total = write(tmp_path / "g.gguf", "gpt-oss", metadata, tensors)
    model, plan = load_model_with_plan(tmp_path / "g.gguf")
    assert plan is not None and planned(tmp_path / "g.gguf") == total
    assert [model.kv_tokens(i, 1000) for i in range(4)] == [128, 1000, 128, 1000]
    assert model.expert_matrix_bytes(plan, 2)["up"] == 256 * 256 // 32 * 17 + 256 * 4


def test_hybrid_layers_and_tables_of_unknown_names(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(n_layers=4)
    metadata |= {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 64, "ssm.group_count": 4, "ssm.time_step_rank": 8}
    for i in (0, 1, 2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"):
            del tensors[f"blk.{i}.{name}.weight"]
        tensors[f"blk.{i}.ssm_in.weight"] = ((1536, 256), Q.Q5_K)
        tensors[f"blk.{i}.ssm_ba.weight"] = ((16, 256), Q.F32)
        tensors[f"blk.{i}.ssm_out.weight"] = ((256, 512), Q.Q4_K)
        tensors[f"blk.{i}.ssm_conv1d.weight"] = ((1024, 4), Q.F32)
        tensors[f"blk.{i}.ssm_dt.bias"] = ((8,), Q.F32)
        tensors[f"blk.{i}.ssm_a"] = ((8,), Q.F32)
    tensors["blk.3.something_new.weight"] = ((256, 256), Q.Q8_0)
    tensors["v.patch.weight"] = ((8, 256), Q.F16)
    total = write(tmp_path / "n.gguf", "qwen3next", metadata, tensors)
    model, plan = load_model_with_plan(tmp_path / "n.gguf")
    assert plan is not None and planned(tmp_path / "n.gguf") == total
    linear = {"n_key_heads": 4, "n_value_heads": 8, "key_head_dim": 64, "value_head_dim": 64, "conv_kernel": 4}
    assert model.attention_at(0) == LinearAttention(kind="linear", **linear)
    assert model.kv_tokens(0, 9) == 0 and model.kv_tokens(3, 9) == 9
    assert model.part_bytes(plan, "vision") == 8 * 256 * 2


def test_one_tensor_per_expert_as_in_old_files(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(n_layers=2)
    for i in range(2):
        for name in ("gate", "up", "down"):
            (_, rows, cols), kind = tensors.pop(f"blk.{i}.ffn_{name}_exps.weight")
            tensors |= {f"blk.{i}.ffn_{name}.{e}.weight": ((rows, cols), kind) for e in range(8)}
    total = write(tmp_path / "old.gguf", "llama", metadata, tensors)
    model, plan = load_model_with_plan(tmp_path / "old.gguf")
    assert plan is not None and planned(tmp_path / "old.gguf") == total
    assert model.expert_params(1) == 3 * 256 * 256
    del tensors["blk.1.ffn_up.7.weight"]
    write(tmp_path / "less.gguf", "llama", metadata, tensors)
    with pytest.raises(InputError, match="8 equal experts.*7 tensors"):
        load_model(tmp_path / "less.gguf")


def test_split_files(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe()
    whole = write(tmp_path / "whole.gguf", "qwen3moe", metadata, tensors)
    halves = [dict(list(tensors.items())[:20]), dict(list(tensors.items())[20:])]
    split = {".split.count": 2, ".split.tensors.count": len(tensors)}
    write(tmp_path / "m-00001-of-00002.gguf", "qwen3moe", metadata | split | {".split.no": 0}, halves[0])
    with pytest.raises(InputError, match="all 2 parts.*no m-00002-of-00002.gguf"):
        load_model(tmp_path / "m-00001-of-00002.gguf")
    write(tmp_path / "m-00002-of-00002.gguf", "qwen3moe", split | {".split.no": 1}, halves[1])
    assert planned(tmp_path / "m-00001-of-00002.gguf") == whole
    with pytest.raises(InputError, match="the first part"):
        load_model(tmp_path / "m-00002-of-00002.gguf")
    write(tmp_path / "m-00002-of-00002.gguf", "qwen3moe", split | {".split.no": 1}, dict(list(halves[1].items())[1:]))
    with pytest.raises(InputError, match="different tensors in all parts"):
        load_model(tmp_path / "m-00001-of-00002.gguf")


def test_every_cut_is_refused_with_its_byte(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(n_layers=1)
    metadata |= {".tokenizer.ggml.tokens": ["a", "b"], ".tokenizer.ggml.scores": [0.5]}
    write(tmp_path / "w.gguf", "qwen3moe", metadata, tensors)
    data = (tmp_path / "w.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for n in [*range(4, len(data), 7), len(data) - 1]:
        cut.write_bytes(data[:n])
        with pytest.raises(InputError, match=r"cut.gguf, byte \d+: "):
            load_model(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 1 << 20), value=st.binary(min_size=1, max_size=8))
def test_damage_never_escapes_as_another_error(tmp_path: Path, position: int, value: bytes) -> None:
    source = tmp_path / "w.gguf"
    if not source.exists():
        metadata, tensors = qwen3moe(n_layers=1)
        write(source, "qwen3moe", metadata | {".tokenizer.ggml.tokens": ["a", "b"], ".tokenizer.ggml.scores": [0.5]}, tensors)
    data = bytearray(source.read_bytes())
    position = 4 + position % (len(data) - 4)
    data[position : position + len(value)] = value
    damaged = tmp_path / "x.gguf"
    damaged.write_bytes(bytes(data))
    try:
        load_model_with_plan(damaged)
    except InputError:
        pass


def head(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NESTED = text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 8 + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "byte 4: version: expected 4 bytes.*cut off"),
        (head(1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (head(pairs=1 << 60), "metadata pairs: expected .* bytes, got 0"),
        (head(tensors=1 << 60), "tensor infos: expected .* bytes, got 0"),
        (head(pairs=1) + struct.pack("<Q", 1 << 50) + bytes(64), "metadata key: expected a length of at most 65535"),
        (head(pairs=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64), "UTF-8"),
        (head(pairs=1) + text("k") + struct.pack("<I", 77) + bytes(64), "k: expected a value type of 0 to 12, got 77"),
        (head(pairs=1) + text("k") + struct.pack("<IQ", 8, 1 << 40) + bytes(64), "k: expected 1099511627776 bytes"),
        (head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 62) + bytes(64), "k: expected .* bytes"),
        (head(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 62) + bytes(64), "elements of k"),
        (head(pairs=1) + NESTED + bytes(64), "nested at most 4 deep"),
        (head(pairs=2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, "k: expected each key once"),
        (head(pairs=1) + text("general.alignment") + struct.pack("<II", 4, 7), "a multiple of 8"),
        (head(tensors=1) + info("t", (1, 1, 1, 1, 1), 0), "t: expected 1 to 4 dimensions, got 5"),
        (head(tensors=1) + info("t", (0, 4), 0), "sizes of 1 or more"),
        (head(tensors=1) + info("t", (1 << 40, 1 << 40), 0), "below 2\\*\\*48"),
        (head(tensors=1) + info("t", (256,), 139), "a known tensor type, got 139"),
        (head(tensors=1) + info("t", (100,), 12), r"rows of a multiple of 256 \(Q4_K\), got 100"),
        (head(tensors=1) + info("t", (256,), 0, 5), "an offset that is a multiple of 32"),
        (head(tensors=2) + info("t", (256,), 0) * 2, "t: expected each tensor once"),
        (head(), "general.architecture"),
        (head(pairs=1) + text("general.architecture") + struct.pack("<I", 8) + text("llama"), "no expert count"),
    ],
)
def test_bad_headers(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        load_model(path)
    assert "bad.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 0}, "no expert count"),
        ({"expert_count": 16}, "16 experts, as expert_count says"),
        ({"expert_used_count": 9}, "top_k at most n_experts"),
        ({"expert_used_count": "2"}, "qwen3moe.expert_used_count: expected a whole number"),
        ({"block_count": 2_000_000}, "block_count"),
        ({"block_count": 9}, "layer 6 has no tensors"),
        ({"attention.head_count": 0}, "attention.head_count"),
        ({"attention.head_count": 7}, "a multiple of the 2 K/V heads"),
        ({"attention.head_count_kv": [2, 2]}, "6 numbers of 0 or more, got 2 numbers"),
        ({"attention.sliding_window": 64, "attention.sliding_window_pattern": ["x"]}, "a list of true or false"),
        ({"nextn_predict_layers": 6}, "block_count"),
    ],
)
def test_facts_that_contradict_the_tensors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata, tensors = qwen3moe()
    write(tmp_path / "m.gguf", "qwen3moe", metadata | change, tensors)
    with pytest.raises(InputError, match=message):
        load_model(tmp_path / "m.gguf")


def test_missing_tensors(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe()
    write(tmp_path / "a.gguf", "qwen3moe", metadata, {k: v for k, v in tensors.items() if "token_embd" not in k})
    with pytest.raises(InputError, match="token_embd.weight"):
        load_model(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf", "qwen3moe", metadata, {k: v for k, v in tensors.items() if "_exps" not in k})
    with pytest.raises(InputError, match="ffn_up_exps"):
        load_model(tmp_path / "b.gguf")
