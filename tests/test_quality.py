"""Quality: quantised models store what the ledger counts and compute what their bytes stand for; figures, intervals, sensitivity, search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="quality is measured on real models: pip install 'moesim[quality]'")

from moesim.errors import InputError  # noqa: E402
from moesim.precision import PrecisionPlan, plan_from  # noqa: E402
from moesim.quality.calibration import calibrate  # noqa: E402
from moesim.quality.claims import FAILS, HOLDS, order_claims  # noqa: E402
from moesim.quality.evaluate import Evaluation, agreement, buckets, evaluate  # noqa: E402
from moesim.quality.interval import Bootstrap, Figure  # noqa: E402
from moesim.quality.plans import ladder  # noqa: E402
from moesim.quality.quantise import Quantised, folds, originals, quantise, restore, stated_bytes  # noqa: E402
from moesim.quality.real_weights import run_real  # noqa: E402
from moesim.quality.search import Costs, assign, path_of, plan_of, steps_of  # noqa: E402
from moesim.quality.sensitivity import units_of  # noqa: E402
from moesim.quality.store import Results  # noqa: E402
from moesim.quality.study import Study, hit_rates  # noqa: E402
from moesim.quality.subject import TinyMoe, load_subject, weights_in  # noqa: E402
from moesim.quality.text import Text, read_token_file, windows_of  # noqa: E402
from moesim.quality.tune import tune, weights_of  # noqa: E402
from moesim.scenario import Scenario  # noqa: E402
from moesim.simulate import make_case  # noqa: E402
from moesim.trace import RoutingTrace  # noqa: E402

LOWRANK = {"default": "int2-g64", "norms": "bf16", "rounding": "aware", "adapters": {"rank": 4, "experts": 8}}


@pytest.fixture(scope="module")
def tiny() -> TinyMoe:
    return load_subject("tinymoe")  # type: ignore[return-value]


@pytest.fixture(scope="module")
def held(tiny: TinyMoe) -> Text:
    return read_token_file(tiny.folder / "heldout.npz")


@pytest.fixture(scope="module")
def other(tiny: TinyMoe) -> Text:
    return read_token_file(tiny.folder / "calibration.npz")


@pytest.fixture(scope="module")
def heard(tiny: TinyMoe, other: Text) -> Any:
    return calibrate(tiny, other.split()[0].head(6000))


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, the model has its own weights afterwards."""
    if "tiny" not in request.fixturenames:
        yield
        return
    subject = request.getfixturevalue("tiny")
    own = originals(subject)
    yield
    assert all(torch.equal(weights_in(subject)[site.key], own[site.key]) for site in subject.sites)


# ---- texts


def test_texts_of_different_use_share_no_document(held: Text, other: Text) -> None:
    calibration, choosing = other.split()
    parts = [{d[:256].tobytes() for d in text.documents} for text in (held, calibration, choosing)]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert len(calibration.documents) + len(choosing.documents) == len(other.documents)
    assert set(calibration.domains) == set(choosing.domains) == set(held.domains)


@pytest.mark.parametrize("first", [0, None])
def test_windows_predict_every_token_once_and_pad_nothing(first: int | None) -> None:
    text = Text((np.arange(1, 11), np.arange(20, 24)), ("a", "b"), (0, 0))
    batches = windows_of(text, 4, first)
    seen = [(int(d), int(x), int(y)) for b in batches for d, xs, ys in zip(b.document, b.inputs, b.targets, strict=True) for x, y in zip(xs, ys, strict=True)]  # fmt: skip
    whole = [(0, first, 1), (1, first, 20)] if first is not None else []
    want = whole + [(0, i, i + 1) for i in range(1, 10)] + [(1, i, i + 1) for i in range(20, 23)]
    assert sorted(seen) == sorted(want)
    assert all(b.inputs.shape[1] <= 4 for b in batches)


def test_bits_per_byte_are_those_of_the_models_card(tiny: TinyMoe, held: Text) -> None:
    """The first documents of a domain, against the project's other evaluation."""
    docs = held.take([i for i, d in enumerate(held.domains) if d == "man-fr"][:3])
    found = Bootstrap(docs).bits(evaluate(tiny, docs, routing=False)[0])["mean"][0]
    total = 0.0
    with torch.no_grad():
        for ids in docs.documents:
            inputs = np.concatenate(([0], ids[:-1]))
            for at in range(0, len(ids), 256):
                logits = tiny.module(torch.from_numpy(inputs[None, at : at + 256]))[0]
                total += float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[at : at + 256]), reduction="sum"))
    assert found == pytest.approx(total / np.log(2) / sum(docs.byte_counts), rel=1e-5)


# ---- bytes


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "mixed", "attention16", "int3", "int3-edges8", "int2+lowrank"])
def test_stored_bytes_are_the_ledgers(tiny: TinyMoe, heard: Any, name: str, tmp_path: Path) -> None:
    plan = ladder(tiny.spec)[name]
    found = quantise(tiny, plan, heard)
    scenario = Scenario.model_validate({
        "model": "tinymoe", "precision": plan.model_dump(mode="json", exclude_none=True), "hardware": "laptop-8gb",
        "trace": {"source": "tinymoe"}, "placement": {"attention": "cpu", "experts": "cpu", "pools": {"ram": {"hold": "all"}}},
    })  # fmt: skip
    lines = make_case(scenario).layout.ledger.lines
    assert found.stored_bytes == sum(line.bytes for line in lines if line.pool in ("weights", "experts"))
    found.save(tmp_path / "model.safetensors")
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "model.safetensors").stat().st_size - 8 - header == found.stored_bytes
    again = Quantised.load(tmp_path / "model.safetensors")
    assert again.plan == plan and again.packed.keys() == found.packed.keys() and again.adapters.keys() == found.adapters.keys()
    assert all(torch.equal(again.weight(site), found.weight(site)) for site in tiny.sites)


def test_a_format_that_cannot_be_held_is_refused(tiny: TinyMoe, heard: Any) -> None:
    with pytest.raises(InputError, match="real kernel"):
        quantise(tiny, plan_from("Q4_K"), heard)
    with pytest.raises(InputError, match="layers 0 to 7"):
        quantise(tiny, plan_from({"default": "int8", "overrides": [{"part": "attention", "layers": [8], "format": "fp16"}]}), heard)


# ---- what is computed


def rescaled(subject: Any, own: dict[str, torch.Tensor], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """A model's weights with a random scale in every fold: in its users, and out of what makes their input."""
    weights = dict(own)
    for fold in folds(subject):
        scale = torch.rand(int(fold.made_by.max()) + 1, generator=rng) + 0.5
        for site in fold.users:
            weights[site.key] = weights[site.key] * scale[fold.made_by]
        made = weights[fold.maker.key]
        weights[fold.maker.key] = made / scale if fold.maker.part == "norms" else made / scale[:, None]
    return weights


def test_scales_that_are_folded_change_nothing_by_themselves(tiny: TinyMoe, heard: Any) -> None:
    """With float formats nothing is rounded: the scaled model is the model. A wrong fold (of a group's heads, say) would show."""
    own = originals(tiny)
    rng = torch.Generator().manual_seed(0)
    weights = rescaled(tiny, own, rng)
    tokens = torch.arange(1, 65)[None]
    with torch.no_grad():
        before = tiny.run(tokens)
        restore(tiny, weights)
        after = tiny.run(tokens)
    restore(tiny, own)
    assert torch.allclose(before, after, atol=2e-3)
    assert len(list(folds(tiny))) == 8 * (1 + 1 + 1 + 16) + 1


@pytest.mark.parametrize("plan", [{"default": "fp16"}, {"default": "int4-g64-torch", "norms": "bf16", "rounding": "aware"}, LOWRANK])
def test_the_real_engine_gives_the_loss_of_the_reference(tiny: TinyMoe, held: Text, heard: Any, plan: dict[str, Any]) -> None:
    found = quantise(tiny, plan_from(plan), heard)
    own = originals(tiny)
    restore(tiny, weights_of(tiny, found))
    try:
        check = run_real(tiny, found, windows_of(held, 256, 0, 8)[0])
        bare = run_real(tiny, Quantised(found.plan, found.packed, {}), windows_of(held, 256, 0, 8)[0]) if found.adapters else None
    finally:
        restore(tiny, own)
    assert check.differences == [] and check.relative < 1e-3 and check.router_agreement > 0.98
    assert bare is None or bare.relative > 3 * check.relative  # without its adapters it is another model


def test_each_compensation_lowers_the_loss_at_two_bits(tiny: TinyMoe, other: Text, heard: Any) -> None:
    choosing = other.split()[1].head(3000)
    own = originals(tiny)
    losses = []
    for more in ({}, {"rounding": "clip"}, {"rounding": "aware"}):
        restore(tiny, weights_of(tiny, quantise(tiny, plan_from({"default": "int2-g64", "norms": "bf16"} | more), heard)))
        losses.append(evaluate(tiny, choosing, routing=False)[0].mean_loss)
        restore(tiny, own)
    assert losses[0] > losses[1] > losses[2]


def test_tuned_adapters_are_better_and_the_rest_stays_frozen(
    tiny: TinyMoe, other: Text, heard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module("moesim.quality.tune")
    monkeypatch.setattr(module, "STEPS", 10)
    calibration, choosing = other.split()
    start = quantise(tiny, plan_from(LOWRANK), heard)
    hot = heard.most_routed(0, 8)
    assert {int(key.rpartition(".")[2]) for key in start.adapters if key.startswith("layers.0.")} == set(hot)
    tuned = tune(tiny, start, calibration, choosing.head(2000))
    assert tuned.packed is start.packed and tuned.stored_bytes == start.stored_bytes == stated_bytes(tiny.spec, start.plan)
    own = originals(tiny)
    losses = [module.loss_of(tiny, it, choosing.head(2000)) for it in (start, tuned)]
    restore(tiny, own)
    assert losses[1] < losses[0]


def test_the_trace_is_what_the_quantised_router_chose(tiny: TinyMoe, held: Text, heard: Any) -> None:
    text = held.take([0, 20]).head(700)
    _, base = evaluate(tiny, text)
    own = originals(tiny)
    restore(tiny, weights_of(tiny, quantise(tiny, plan_from("int2-g64"), heard)))
    _, moved = evaluate(tiny, text)
    restore(tiny, own)
    assert base is not None and moved is not None
    assert base.n_rows == text.n_tokens and (base.n_layers, base.n_experts, base.top_k) == (8, 16, 2)
    assert agreement(base, base) == 1.0 and 0.3 < agreement(base, moved) < 0.9
    rates = hit_rates(base)
    assert list(rates) == ["25%", "50%", "75%"] and 0 < rates["25%"] < rates["75%"] < 1


def test_agreement_is_of_sets() -> None:
    def trace(ids: list[list[list[int]]]) -> RoutingTrace:
        n = len(ids)
        meta = {"n_experts": 4}
        return RoutingTrace(np.array(ids, np.int16), None, np.zeros(n, np.int32), np.arange(n, dtype=np.int32), np.zeros(n, np.uint8), meta)

    assert agreement(trace([[[0, 1], [2, 3]], [[1, 2], [0, 1]]]), trace([[[1, 0], [2, 1]], [[1, 2], [0, 1]]])) == 0.75


# ---- figures


def two_domains() -> Text:
    return Text(tuple(np.arange(10) for _ in range(4)), ("a", "a", "b", "b"), (10, 30, 20, 20))


def losses(*bits: float) -> Evaluation:
    loss = np.array(bits)[:, None] * np.log(2)
    return Evaluation(loss, np.full((len(bits), 1), 10), np.zeros(len(bits), np.int64))


def test_bits_per_byte_are_of_domains_alike() -> None:
    draws = Bootstrap(two_domains())
    bits = draws.bits(losses(20, 60, 40, 120))
    assert bits["a"][0] == 2.0 and bits["b"][0] == 4.0 and bits["mean"][0] == 3.0
    figure = draws.figure(losses(20, 60, 40, 120))
    # domain a has 2 bits a byte whichever documents are drawn; b has 2, 4 or 6
    assert (figure.value, figure.low, figure.high) == (3.0, 2.0, 4.0)


def test_changes_are_over_the_same_draws() -> None:
    """Every document loses 10 %: so does every draw, however different the documents are."""
    base, worse = losses(20, 60, 40, 120), losses(22, 66, 44, 132)
    change = Bootstrap(two_domains()).change(worse, base)
    assert (change.value, change.low, change.high) == pytest.approx((10.0, 10.0, 10.0))
    half = Bootstrap(two_domains()).recovered(losses(21, 63, 42, 126), worse, base)
    assert (half.value, half.low, half.high) == pytest.approx((50.0, 50.0, 50.0))


def test_intervals_cover_the_truth() -> None:
    """Of 95 % intervals of a known mean about 95 % hold it."""
    rng = np.random.default_rng(0)
    text = Text(tuple(np.arange(10) for _ in range(40)), ("a",) * 40, (10,) * 40)
    hits = 0
    for _ in range(100):
        found = Bootstrap(text).figure(losses(*rng.normal(30, 5, 40)))
        hits += found.low <= 3.0 <= found.high
    assert 85 <= hits <= 100


def test_buckets_double_up_to_the_window() -> None:
    assert buckets(256) == [16, 32, 64, 128, 256] and buckets(100) == [16, 32, 64, 100] and buckets(8) == [8]


# ---- search


def toy_costs() -> Costs:
    sizes = {"fp16": 16, "int8": 8, "int4": 4}
    return Costs(
        ("fp16", "int8", "int4"),
        {(0, "attention"): sizes, (1, "attention"): sizes, (-1, "head"): sizes},
        {
            (0, "attention"): {"fp16": 0.0, "int8": 0.8, "int4": 0.6},  # 8 bits are on no hull: 4 bits cost less
            (1, "attention"): {"fp16": 0.0, "int8": 0.0, "int4": 4.0},
            (-1, "head"): {"fp16": 0.0, "int8": 0.1, "int4": 0.3},
        },
    )


def test_steps_follow_the_lower_hull() -> None:
    costs = toy_costs()
    assert [(s.level, s.saved_bytes) for s in steps_of(costs, (0, "attention"))] == [("int4", 12)]
    assert [(s.level, s.cost) for s in steps_of(costs, (1, "attention"))] == [("int8", 0.0), ("int4", 4.0)]
    path = path_of(costs)
    assert [(s.unit, s.level) for s in path] == [
        ((1, "attention"), "int8"), ((-1, "head"), "int8"), ((0, "attention"), "int4"), ((-1, "head"), "int4"), ((1, "attention"), "int4"),
    ]  # fmt: skip
    assert [s.slope for s in path] == sorted(s.slope for s in path)
    assert assign(costs, path[:2]) == {(0, "attention"): "fp16", (1, "attention"): "int8", (-1, "head"): "int8"}


def test_a_plan_of_units_gives_each_its_format() -> None:
    assigned = {(0, "attention"): "int8", (1, "attention"): "fp16", (0, "routed_experts"): "int4-g64", (1, "routed_experts"): "int4-g64", (-1, "head"): "int8"}  # fmt: skip
    plan = plan_of(assigned)
    assert all(plan.format(part, layer).name == name for (layer, part), name in assigned.items())
    assert plan.format("router", 0).name == "fp32" and plan.format("norms", 0).name == "bf16"
    assert PrecisionPlan.model_validate_json(plan.model_dump_json()) == plan


def test_claims_have_verdicts_by_their_intervals() -> None:
    def of(low: float, high: float) -> str:
        return order_claims({"bits first": Figure((low + high) / 2, low, high)})[0].verdict

    assert of(0.1, 0.5) == HOLDS and of(-0.5, -0.1) == FAILS and of(-0.1, 0.1) == "cannot be told"
    assert order_claims({}) == []


# ---- studies


def small_study(tiny: TinyMoe, held: Text, other: Text, folder: Path | None) -> Study:
    first = [i for i, d in enumerate(held.domains) if d in ("docs", "code")][::6]
    text = Text(tuple(held.documents[i][:300] for i in first), tuple(held.domains[i] for i in first), (300,) * len(first))
    rest = [i for i, d in enumerate(other.domains) if d in ("docs", "code")][::3]
    mine = Text(tuple(other.documents[i][:400] for i in rest), tuple(other.domains[i] for i in rest), (400,) * len(rest))
    return Study(tiny, text, mine, Results(folder))


def test_what_was_measured_is_found_again(tiny: TinyMoe, held: Text, other: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    study = small_study(tiny, held, other, tmp_path)
    plan = plan_from({"default": "int3-g64", "norms": "bf16"})
    first = study.measure("int3", plan)
    with open(tmp_path / "results.jsonl", "a", encoding="utf-8") as file:
        file.write('{"key": "cut o')  # killed while it wrote
    module = importlib.import_module("moesim.quality.study")
    monkeypatch.setattr(module, "evaluate", lambda *_a, **_k: pytest.fail("measured again"))
    again = small_study(tiny, held, other, tmp_path)
    second = again.measure("int3", plan)
    assert second.evaluation.as_dict() == first.evaluation.as_dict() and second.hit_rates == first.hit_rates
    assert again.reference[1] == study.reference[1]
    assert again.key("plan", plan) != again.key("plan", plan_from("int8"))
    (tmp_path / "results.jsonl").write_text("something else\n")
    with pytest.raises(InputError, match="results of moesim quality"):
        Results(tmp_path)


def test_units_are_every_layer_and_part(tiny: TinyMoe) -> None:
    units = dict(units_of(tiny.sites))
    assert [u for u in units if u.startswith("layer")] == [f"layer {i}" for i in range(8)]
    assert {"attention", "router", "routed_experts", "embeddings", "head"} <= units.keys()
    assert len(units["layer 3"]) == 4 + 1 + 2 + 48 and len(units["attention"]) == 32


def test_a_search_is_within_its_budget_and_better_than_the_reverse(
    tiny: TinyMoe, held: Text, other: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module("moesim.quality.search")
    monkeypatch.setattr(module, "levels_of", lambda _study: ("fp16", "int4-g64-torch", "int2-g64"))
    monkeypatch.setattr(module, "TOKENS", 600)
    study = small_study(tiny, held, other, None)
    costs = module.measure_costs(study)
    assert len(costs.units) == 18
    budget = stated_bytes(tiny.spec, plan_from({"default": "int4-g64-torch", "norms": "bf16", "router": "fp32"}))
    best, back = module.within_bytes(study, costs, budget), module.reverse(study, costs, budget)
    assert stated_bytes(tiny.spec, best) <= budget and stated_bytes(tiny.spec, back) <= budget
    text = study.choosing.head(600)
    found = [study.choosing_loss(weights_of(tiny, quantise(tiny, p, study.heard)), text).mean_loss for p in (best, back)]
    assert found[0] < found[1]
    with pytest.raises(InputError, match="at least .* bytes"):
        module.within_bytes(study, costs, 1000)


# ---- transformers

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 16},
    "Olmoe": {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
}


def folder_of(name: str, path: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="these models need transformers: pip install 'moesim[quality]'")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**(COMMON | ARCHITECTURES[name])))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
            else:
                p.uniform_(0.5, 1.5)
    model.save_pretrained(path / name)
    return path / name


def words(n: int, seed: int) -> Text:
    rng = np.random.default_rng(seed)
    return Text(tuple(rng.integers(2, 96, 50) for _ in range(n)), ("a",) * n, (0,) * n)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_models(name: str, tmp_path: Path) -> None:
    subject = load_subject(str(folder_of(name, tmp_path)))
    heard = calibrate(subject, words(4, 0))
    assert heard.routed.sum() == 2 * 4 * 50 * 2 and set(heard.squares) == {s.source for s in subject.sites if s.source}
    assert all(len(heard.squares[s.source]) == s.cols for s in subject.sites if s.source)
    own = originals(subject)
    assert sum(w.numel() for w in own.values()) == subject.spec.params_total == sum(p.numel() for p in subject.module.parameters())
    text = words(3, 1)
    base, routes = evaluate(subject, text)
    losses = {}
    for label, plan in {
        "fp32": {"default": "fp32"}, "int8": {"default": "int8"}, "int4": {"default": "int4-g64", "rounding": "clip"},
        "aware": {"default": "int2-g64", "rounding": "aware", "adapters": {"rank": 2, "experts": 2}},
    }.items():  # fmt: skip
        found = quantise(subject, plan_from(plan), heard)
        assert found.stored_bytes == stated_bytes(subject.spec, found.plan)
        restore(subject, weights_of(subject, found))
        it, moved = evaluate(subject, text)
        restore(subject, own)
        losses[label] = it.mean_loss
        if label == "fp32":
            assert it.mean_loss == base.mean_loss and routes is not None and moved is not None and agreement(routes, moved) == 1.0
        if label == "aware":
            assert len(found.adapters) == 2 * 2 * 3
    assert abs(losses["int8"] / base.mean_loss - 1) < 0.01
    assert abs(losses["aware"] - base.mean_loss) > abs(losses["int8"] - base.mean_loss)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folded_scales_leave_transformers_models_as_they_are(name: str, tmp_path: Path) -> None:
    subject = load_subject(str(folder_of(name, tmp_path)))
    weights = rescaled(subject, originals(subject), torch.Generator().manual_seed(1))
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        before = subject.run(tokens)
        restore(subject, weights)
        after = subject.run(tokens)
    assert torch.allclose(before, after, atol=1e-3)


def test_adapters_of_a_transformers_model_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("moesim.quality.tune")
    monkeypatch.setattr(module, "STEPS", 5)
    subject = load_subject(str(folder_of("Mixtral", tmp_path)))
    own = originals(subject)
    start = quantise(subject, plan_from({"default": "int2-g64", "adapters": {"rank": 2, "experts": 2}}), calibrate(subject, words(4, 0)))
    tuned = tune(subject, start, words(4, 0), words(2, 2))
    assert tuned.adapters.keys() == start.adapters.keys()
    assert all(torch.equal(weights_in(subject)[site.key], own[site.key]) for site in subject.sites)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = folder_of("Olmoe", tmp_path)
    for file in path.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(InputError, match="safetensors"):
        load_subject(str(path))
