"""Expert stores: bytes where the index says, wrong and missing bytes named, a failed build leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_cases import mixed_plan, small_model

from moesim.errors import InputError
from moesim.model_files import load_model
from moesim.precision import FORMATS, plan_from

torch = pytest.importorskip("torch", reason="expert stores need torch: pip install 'moesim[validate]'")

from moesim.expert_store import ExpertStore, index_path  # noqa: E402
from moesim.expert_store.builder import build_store  # noqa: E402
from moesim.quant.packing import pack  # noqa: E402

LAYOUTS = ["merged", "scattered"]


def make(folder: Path, layout: str = "merged", **more: Any) -> ExpertStore:
    return build_store(folder / f"{layout}.bin", small_model(), mixed_plan(), layout=layout, scattered_piece=8192, **more)


def slot_of(store: ExpertStore, layer: int, expert: int) -> np.ndarray:
    """Read a slot straight from the file."""
    slot = np.zeros(store.slot_bytes(layer), dtype=np.uint8)
    data = store.path.read_bytes()
    for offset, at, size in store.extents(layer, expert):
        slot[at : at + size] = np.frombuffer(data[offset : offset + size], dtype=np.uint8)
    return slot


def places(store: ExpertStore) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in store.layers for expert in range(store.n_experts)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_has_one_place(tmp_path: Path, layout: str) -> None:
    store = make(tmp_path, layout)
    runs = sorted((offset, size) for place in places(store) for offset, _, size in store.extents(*place))
    ends = np.cumsum([size for _, size in runs])
    assert [offset for offset, _ in runs] == [0, *ends[:-1]]
    assert ends[-1] == store.path.stat().st_size
    assert all(offset % 4096 == size % 4096 == 0 for offset, size in runs)
    assert max(size for _, size in runs) == (8192 if layout == "scattered" else store.slot_bytes(0))
    store.verify()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_have_the_bytes_of_the_formats(tmp_path: Path, layout: str) -> None:
    store, model, plan = make(tmp_path, layout), small_model(), mixed_plan()
    for layer in store.layers:
        sizes = model.expert_matrix_bytes(plan, layer)
        assert {name: packed.n_bytes for name, (_, packed) in store.plan(layer).matrices.items()} == sizes
        up = {name: -(-size // 4096) * 4096 for name, size in sizes.items()}
        assert store.slot_bytes(layer) == (-(-sum(sizes.values()) // 4096) * 4096 if layout == "merged" else sum(up.values()))
    tight = make(tmp_path, align=1)
    assert tight.slot_bytes(0) == model.expert_bytes(plan, 0)


def test_layouts_hold_the_same_experts(tmp_path: Path) -> None:
    merged, scattered = (make(tmp_path, layout) for layout in LAYOUTS)
    scattered_runs = scattered.extents(0, 0)
    assert len(scattered_runs) > 3 and [o for o, *_ in scattered_runs] != sorted(o for o, *_ in scattered_runs)
    for layer, expert in places(merged):
        views = [s.views(layer, torch.from_numpy(slot_of(s, layer, expert))) for s in (merged, scattered)]
        for name in ("gate", "up", "down"):
            assert torch.equal(views[0][name].values, views[1][name].values) and torch.equal(views[0][name].scales, views[1][name].scales)


def test_given_weights_come_back_as_quantised(tmp_path: Path) -> None:
    def weights(layer: int, expert: int, matrix: str) -> torch.Tensor:
        rng = np.random.default_rng([layer, expert, len(matrix)])
        return torch.tensor(rng.standard_normal((128, 128)), dtype=torch.float32)

    store = make(tmp_path, weights=weights)
    view = store.views(1, torch.from_numpy(slot_of(store, 1, 5)))["up"]
    assert np.array_equal(
        slot_of(store, 1, 5)[store.plan(1).matrices["up"][0] :][: 128 * 130], pack(weights(1, 5, "up"), FORMATS["int8"]).numpy()
    )
    assert float((view.dequantise() - weights(1, 5, "up")).abs().max()) < 0.02
    with pytest.raises(InputError, match=r"weights of gate, expert 0, layer 0: expected 128 outputs x 128 inputs, got shape \(3, 128\)"):
        make(tmp_path, weights=lambda *_: torch.zeros(3, 128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_sees_wrong_missing_and_partial_loads(tmp_path: Path, layout: str) -> None:
    store = make(tmp_path, layout)
    right = slot_of(store, 0, 3)
    store.check(0, 3, right)
    store.check(0, 3, memoryview(right))
    store.check(0, 3, torch.from_numpy(right))
    other = slot_of(store, 0, 7)
    with pytest.raises(InputError, match="expected expert 3 of layer 0, got expert 7"):
        store.check(0, 3, other)
    with pytest.raises(InputError, match="got other bytes"):
        store.check(0, 3, np.zeros_like(right))
    first, last = store.plan(0).matrices["gate"], store.plan(0).matrices["down"]
    for start, end in ((0, 8), (last[0] + last[1].n_bytes - 8, last[0] + last[1].n_bytes), (0, first[1].n_bytes)):
        partial = right.copy()
        partial[start:end] = other[start:end]
        with pytest.raises(InputError, match="other bytes"):
            store.check(0, 3, partial)


def test_fingerprints_cover_every_request(tmp_path: Path) -> None:
    """In a large expert no run of 128 KiB can be missing unseen."""
    model = load_model("tinymoe").model_copy(update={"n_layers": 1, "hidden_size": 512})
    model = model.model_copy(update={"experts": model.experts.model_copy(update={"n_experts": 2, "intermediate_size": 1024})})
    store = build_store(tmp_path / "x.bin", model, plan_from("bf16"))
    right, other = slot_of(store, 0, 0), slot_of(store, 0, 1)
    for start in range(0, len(right), 131072):
        partial = right.copy()
        partial[start : start + 131072] = other[start : start + 131072]
        with pytest.raises(InputError, match="other bytes"):
            store.check(0, 0, partial)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_wrong_bit_is_named(tmp_path: Path, layout: str) -> None:
    store = make(tmp_path, layout)
    at, packed = store.plan(1).matrices["up"]
    hit = at + packed.n_bytes // 2
    offset, begin = next((o, a) for o, a, size in store.extents(1, 9) if a <= hit < a + size)
    with open(store.path, "r+b") as file:
        file.seek(offset + hit - begin)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    piece = offset + at if layout == "merged" else offset
    with pytest.raises(
        InputError, match=rf"{layout}.bin: checksum: expected matrix up of expert 9 in layer 1, got .* from offset {piece:,}"
    ):
        ExpertStore.open(store.path).verify()


def test_padding_is_covered_too(tmp_path: Path) -> None:
    store = make(tmp_path)
    with open(store.path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(InputError, match="matrix down of expert 15 in layer 1"):
        store.verify()


@pytest.mark.parametrize(
    "cut,words", [(1, "expert 15 of layer 1 is missing"), (60_000, "2 experts are missing or incomplete, the first is expert 14")]
)
def test_short_file_names_what_is_missing(tmp_path: Path, cut: int, words: str) -> None:
    store = make(tmp_path)
    os.truncate(store.path, store.index.data_bytes - cut)
    with pytest.raises(InputError, match=words):
        ExpertStore.open(store.path)


def test_long_and_missing_files(tmp_path: Path) -> None:
    store = make(tmp_path)
    with open(store.path, "ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=f"expected {store.index.data_bytes:,} bytes, got {store.index.data_bytes + 1:,}"):
        ExpertStore.open(store.path)
    store.path.unlink()
    with pytest.raises(InputError, match="expected a readable file"):
        ExpertStore.open(store.path)
    with pytest.raises(InputError, match="none.bin.json: file: expected an existing file"):
        ExpertStore.open(tmp_path / "none.bin")


@pytest.mark.parametrize(
    "change,words",
    [
        ({"n_experts": 15}, "data_bytes"),
        ({"crc32": [1, 2]}, "crc32: expected 96 checksums, got 2 checksums"),
        ({"fingerprints": ["zz"] * 32}, "fingerprints.0"),
        ({"layout": "sideways"}, "layout"),
        ({"extra": 1}, "extra"),
        ({"vector_unit": "NEON"}, "build the store on this machine"),
        ({"align": 8192}, "data_bytes"),
        ({"layers": []}, "layers"),
    ],
)
def test_wrong_index_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    store = make(tmp_path)
    data = json.loads(index_path(store.path).read_text()) | change
    index_path(store.path).write_text(json.dumps(data))
    with pytest.raises(InputError, match=words) as error:
        ExpertStore.open(store.path)
    assert "merged.bin.json" in str(error.value)
    index_path(store.path).write_text('{"kind": ')
    with pytest.raises(InputError, match="expected JSON"):
        ExpertStore.open(store.path)


def test_overlapping_pieces_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path, "scattered")
    data = json.loads(index_path(store.path).read_text())
    data["offsets"][0] = data["offsets"][1]
    index_path(store.path).write_text(json.dumps(data))
    with pytest.raises(InputError, match="overlap or leave gaps"):
        ExpertStore.open(store.path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    files = open_files()

    def interrupt(done: int, total: int) -> None:
        assert total == 32
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, progress=interrupt)
    assert os.listdir(tmp_path) == []
    assert open_files() == files


def test_full_disk_leaves_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make(tmp_path)
    before = old.path.read_bytes(), index_path(old.path).read_bytes()
    files, real, calls = open_files(), os.pwrite, []

    def full(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2 + 1], offset)  # short writes are carried on

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            InputError, match=rf"expected {len(before[0]):,} bytes of space, got No space left on device; [\d,]+ bytes free"
        ):
            make(tmp_path, seed=1)
    assert (old.path.read_bytes(), index_path(old.path).read_bytes()) == before
    assert sorted(os.listdir(tmp_path)) == ["merged.bin", "merged.bin.json"]
    assert open_files() == files


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(InputError, match="File too large; "):
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 99, 99))
    with pytest.raises(InputError, match="bytes of space, got 99 bytes free"):
        make(tmp_path)
    with pytest.raises(InputError, match="a name in an existing folder"):
        make(tmp_path / "none")


def test_what_cannot_be_stored() -> None:
    folder = Path("/nowhere")
    with pytest.raises(InputError, match="declares totals only"):
        build_store(folder, load_model("ref-23b"), plan_from("int8"))
    with pytest.raises(InputError, match="experts of the matrices gate, up, down, got gate, gate_bias"):
        build_store(folder, load_model("gpt-oss-20b"), plan_from("int8"))
    with pytest.raises(InputError, match="one with a real kernel"):
        build_store(folder, small_model(), plan_from("Q4_K"))
    with pytest.raises(InputError, match="a multiple of align"):
        build_store(folder, small_model(), mixed_plan(), layout="scattered", scattered_piece=5000)


def test_unknown_experts_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    for layer, expert in ((2, 0), (0, 16), (0, -1)):
        with pytest.raises(InputError, match=f"got expert {expert} of layer {layer}"):
            store.extents(layer, expert)
