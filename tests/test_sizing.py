"""Sizing: the cheapest that meets the needs comes first, every figure can be had again by its command, prices keep their age."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.prices import load_prices, price_lines, total, upgrade_lines
from moesim.report import sizing as report_sizing
from moesim.resources import names
from moesim.simulate import load_case, simulate
from moesim.sizing import Sizing, _miss, _Search, _with_owned_cards, size
from moesim.sizing.machines import candidates, canonical, upgrades
from moesim.sizing.needs import load_needs
from moesim.sizing.run import Judge, Verdict
from moesim.whatif import DRAWS
from moesim.whatif.replay import Replay, speed_of
from moesim.whatif.uncertainty import effects, interval

TODAY = datetime.date(2025, 7, 1)
SMALL = "ryzen-9600x + ddr5-5600x2:32GiB + nvme-gen4"
CARD = f"rtx-5060-ti-16gb + {SMALL}"
BIG = f"rtx-5090 + {SMALL}"


def needs(folder: Path, **changes: Any) -> str:
    """A needs file of the smallest bundled model on three machines; its speed there is in the thousands."""
    data = {
        "models": ["tinymoe"], "context_tokens": 256, "prompt_tokens": 64, "level": {"decode_tok_s": 1.0}, "quality": {"floor_bits": 8},
        "budget": {"amount": 10_000, "currency": "USD"}, "consider": [BIG, SMALL, CARD], **changes,
    }  # fmt: skip
    path = folder / "needs.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False))
    return str(path)


def sized(folder: Path, **changes: Any) -> Sizing:
    stated, where = load_needs(needs(folder, **changes))
    return size(stated, where, load_prices(), TODAY)


def speeds(folder: Path) -> dict[str, float]:
    """tokens/s of each machine with eight bits."""
    stated, where = load_needs(needs(folder))
    judge = Judge(stated, where)
    return {machine: judge.verdict(canonical(machine), "tinymoe").speed for machine in (SMALL, CARD, BIG)}


def settings_of(text: str) -> tuple[str, ...]:
    words = shlex.split(text)
    return tuple(words[i + 1] for i, word in enumerate(words) if word == "--set")


def test_the_cheapest_that_meets_the_needs_comes_first(tmp_path: Path) -> None:
    every = speeds(tmp_path)
    assert len(set(every.values())) == 3
    slowest = min(every.values())
    easy = sized(tmp_path, level={"decode_tok_s": 0.5 * slowest})
    assert [o.machine for o in easy.ranked][0] == canonical(SMALL)
    costs = [o.cost for o in easy.ranked]
    assert costs == sorted(costs, key=lambda c: c or 0.0) and all(o.reached >= 1 for o in easy.ranked)
    assert [o.reached for o in easy.ranked] == sorted(o.reached for o in easy.ranked)
    fastest = max(every, key=lambda m: every[m])
    hard = sized(tmp_path, level={"decode_tok_s": 0.999 * every[fastest]}, quality={"formats": ["Q8_0"]})
    assert [o.machine for o in hard.ranked] == [canonical(fastest)]
    assert {m.option.machine for m in hard.misses} == {canonical(m) for m in every if m != fastest}


def test_every_figure_can_be_had_again_by_its_command(tmp_path: Path) -> None:
    found = sized(tmp_path)
    option = found.ranked[0]
    verdict = option.verdicts[0]
    case = load_case("sizing", settings_of(verdict.command()))
    result = simulate(case, keep=False)
    assert speed_of(result) == verdict.speed
    assert {t: it["left_bytes"] for t, it in result.as_dict()["memory"].items()} == verdict.left_bytes
    assert result.as_dict()["energy"]["average_w"] == verdict.watts and result.as_dict()["quality"] == verdict.quality
    assert {lane: it["utilisation"] for lane, it in result.as_dict()["lanes"].items()} == verdict.lanes
    first = simulate(load_case("sizing", settings_of(verdict.command("ttft"))), keep=False)
    assert first.as_dict()["metrics"]["ttft_ms"]["mean"] / 1e3 == pytest.approx(verdict.ttft_s, rel=1e-12)  # one chunk holds the prompt
    replay = Replay(case)
    spread = interval(replay, effects(replay, sizes=False), DRAWS, case.scenario.seed)
    assert (spread.low, spread.high) == option.intervals[0]
    assert verdict.command("interval").startswith("moesim whatif --quick sizing --set ")
    assert option.intervals[0][0] < verdict.speed < option.intervals[0][1] * 1.05


def test_experts_are_computed_or_fetched_where_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(*load_needs(needs(tmp_path)))
    by_cpu = Verdict(CARD, "tinymoe", settings={"placement.site": "in-place"}, reached=0.9)
    monkeypatch.setattr(judge, "judged", lambda settings, label: replace(by_cpu, settings=settings, switches=label, reached=1.1))
    assert judge.hybrid(by_cpu).settings == {"placement.site": "hybrid"} and judge.hybrid(by_cpu).reached == 1.1
    for better in (replace(by_cpu, reached=1.2), replace(by_cpu, settings={})):
        assert judge.hybrid(better) is better


def test_more_precise_weights_are_taken_where_they_still_meet_the_needs(tmp_path: Path) -> None:
    assert sized(tmp_path).ranked[0].worst.experts == "bf16"
    every = speeds(tmp_path)
    tight = sized(tmp_path, level={"decode_tok_s": 0.9999 * every[SMALL]}, consider=[SMALL])
    assert tight.ranked[0].worst.experts == "Q8_0"


def test_what_no_machine_can_do_gets_the_nearest(tmp_path: Path) -> None:
    found = sized(tmp_path, level={"decode_tok_s": 1e9})
    assert found.best is None and not found.ranked and found.misses[0].option.machine == canonical(BIG)
    assert found.counts["ruled out by a bound"] == 3  # no token is faster than its weights are read
    every = speeds(tmp_path)
    poor = sized(tmp_path, level={"decode_tok_s": 0.9 * every[CARD]}, budget={"amount": 1000, "currency": "USD"}, consider=[CARD])
    assert not poor.ranked and poor.above and poor.best is not None
    assert "nothing within the budget" in report_sizing.headline(poor)
    assert poor.base is not None and poor.base.worst.experts == poor.formats[-1] == "Q8_0"  # as its upgrades, whatever is recommended
    near = sized(tmp_path, level={"decode_tok_s": (every[CARD] + every[BIG]) / 2}, consider=[CARD], quality={"formats": ["Q8_0"]})
    assert near.best is None and near.misses[0].option.machine == canonical(CARD)
    assert near.misses[0].fix is not None and near.misses[0].fix.option.reached >= 1


def test_a_bound_is_never_below_what_is_simulated(tmp_path: Path) -> None:
    stated, where = load_needs(needs(tmp_path))
    judge = Judge(stated, where)
    for machine, speed in speeds(tmp_path).items():
        assert judge.bound(canonical(machine), "tinymoe", "Q8_0") >= speed


def test_what_is_owned_costs_nothing(tmp_path: Path) -> None:
    found = sized(tmp_path, owned=SMALL, consider=None)
    assert found.ranked[0].machine == canonical(SMALL) and found.ranked[0].cost == 0 and not found.ranked[0].lines
    assert found.base is not None and found.base.machine == canonical(SMALL)
    by_label = {f.step.label: f for f in found.values}
    ram = by_label["+32 GiB RAM"]
    assert ram.cost == pytest.approx(32 * 3.0)
    assert ram.option.worst.speed == pytest.approx(found.base.worst.speed)  # all of it is in memory already
    assert by_label["rtx-5060-ti-16gb as the card"].cost == pytest.approx(429)


def test_several_models_must_all_meet_the_level(tmp_path: Path) -> None:
    found = sized(tmp_path, models=["tinymoe", "olmoe-1b-7b"], consider=[BIG])
    option = found.ranked[0]
    assert [v.model for v in option.verdicts] == ["tinymoe", "olmoe-1b-7b"]
    assert option.worst.model == "olmoe-1b-7b" and option.reached == option.verdicts[1].reached


def test_a_batch_is_judged_by_its_requests(tmp_path: Path) -> None:
    batch = {"requests": 1000, "prompt_tokens": 64, "output_tokens": 32, "within": "1 h"}
    found = sized(tmp_path, level=None, batch=batch, consider=[SMALL])
    v = found.ranked[0].worst
    assert v.requests_per_h == pytest.approx(3600 / (v.ttft_s + 32 / (v.users * v.speed)))
    assert v.reached == pytest.approx(v.requests_per_h / 1000)
    assert found.ranked[0].growth is None


def test_a_miss_says_all_that_it_lacks(tmp_path: Path) -> None:
    every = speeds(tmp_path)
    found = sized(tmp_path, level={"decode_tok_s": 2 * every[SMALL], "ttft": "1 us"}, consider=[SMALL])
    lacks = json.loads(report_sizing.sizing_json(found))["misses"][0]["short"]
    assert f"{every[SMALL]:.3g} of " in lacks and "first token after" in lacks and "of 1 us" in lacks


def test_growth_names_what_fails_first(tmp_path: Path) -> None:
    every = speeds(tmp_path)
    found = sized(tmp_path, level={"decode_tok_s": 0.95 * every[SMALL]}, consider=[SMALL], quality={"formats": ["Q8_0"]})
    growth = found.ranked[0].growth
    assert growth is not None and growth.users.times == 2 and growth.users.why.startswith("speed: ")
    for load in (growth.users, growth.context):
        assert speed_of(simulate(load_case("sizing", settings_of(load.command)), keep=False)) == load.speed
    data = json.loads(report_sizing.sizing_json(found))["ranked"][0]["growth"]
    assert data["users_times"] == 2 and data["users_decode_tok_s"] == growth.users.speed and data["users_command"] == growth.users.command
    for text in (report_sizing.sizing_text(found), report_sizing.sizing_markdown(found)):
        assert growth.users.command in text and growth.context.command in text and "decided anew" in text


def test_what_is_owned_costs_nothing_in_a_cure_and_is_not_left_out(tmp_path: Path) -> None:
    every = speeds(tmp_path)
    level = {"decode_tok_s": (every[SMALL] + every[CARD]) / 2}
    other = "ryzen-9900x + ddr5-5600x2:32GiB + nvme-gen4"
    stated, where = load_needs(needs(tmp_path, level=level, owned=CARD))
    search = _Search(stated, Judge(stated, where), load_prices(), None)
    option = search.option(canonical(other))
    assert option.reached < 1
    fix = _miss(search, option, first=True).fix
    assert fix is not None and (fix.step.label, fix.cost) == ("rtx-5060-ti-16gb as the card", 0)
    assert _with_owned_cards(search, [option.machine, fix.step.machine], [option]) == []
    assert _with_owned_cards(search, [option.machine], [option]) == [option]


def test_what_does_not_fit_is_said_in_words(tmp_path: Path) -> None:
    found = sized(tmp_path, models=["qwen3-30b-a3b"], consider=[SMALL.removesuffix(" + nvme-gen4")], quality={"formats": ["bf16"]})
    assert found.misses[0].option.worst.problem.endswith(" GB too many in ram") and "GB" in report_sizing.sizing_text(found)


def test_the_nearest_is_the_best_of_those_considered(tmp_path: Path) -> None:
    parts = ["rtx-5090 + ryzen-9600x + ddr5-5600x2:32GiB + nvme-gen4", "rtx-3090 + ryzen-9900x + ddr5-5600x2:128GiB + nvme-gen4"]
    found = sized(tmp_path, models=["qwen3-235b-a22b"], level={"decode_tok_s": 1e6}, consider=parts, quality={"formats": ["Q4_K"]})
    assert found.counts["ruled out by a bound"] == 2
    every = {o.option.machine: o.option.reached for o in found.misses}
    assert found.misses[0].option.machine == max(every, key=lambda m: every[m]) and len(every) == 2
    assert "fastest memory filled first" in found.rule


# ---- prices


def test_prices_add_up_and_keep_their_age() -> None:
    lines = price_lines(CARD, load_prices())
    assert total(lines) == pytest.approx(429 + 279 + 90 + 32 * 3.0 + 450)
    card = next(line for line in lines if line.what == "rtx-5060-ti-16gb")
    assert card.age_days(datetime.date(2025, 10, 13)) == 180 and not card.outdated(datetime.date(2025, 10, 13))
    assert card.outdated(datetime.date(2025, 10, 14))


def test_a_part_without_a_price_leaves_the_machine_without_one() -> None:
    assert total(price_lines("l40s + ryzen-9600x + ddr5-5600x2:32GiB", load_prices())) is None


def test_an_own_table_takes_the_place_of_the_bundled_one(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    mine = {"amount": 500, "currency": "EUR", "date": "2025-06-30", "basis": "reported", "source": "my dealer"}
    path.write_text(yaml.safe_dump({"currency": "EUR", "rates": {"USD": 0.5}, "parts": {"rtx-5060-ti-16gb": mine}}))
    table = load_prices(path)
    assert table.currency == "EUR"
    assert total(price_lines(CARD, table)) == pytest.approx(500 + 0.5 * (279 + 90 + 32 * 3.0 + 450))
    path.write_text(yaml.safe_dump({"currency": "EUR", "parts": {"rtx-5060-ti-16gb": mine}}))
    with pytest.raises(InputError, match="a rate of USD in EUR"):
        load_prices(path)
    path.write_text(
        yaml.safe_dump({"currency": "USD", "parts": {"rtx-5060": {**mine, "currency": "USD"}, "rtx-9999": {**mine, "currency": "USD"}}})
    )
    with pytest.raises(InputError, match="rtx-9999"):
        load_prices(path)


def test_parts_that_are_owned_are_not_bought_again() -> None:
    table = load_prices()
    bought = upgrade_lines(price_lines(f"2 x {CARD}", table), price_lines(CARD, table))
    assert [(line.what, line.count) for line in bought] == [("rtx-5060-ti-16gb", 1)]


def test_outdated_prices_are_said_everywhere(tmp_path: Path) -> None:
    stated, where = load_needs(needs(tmp_path, consider=[SMALL]))
    old = size(stated, where, load_prices(), datetime.date(2026, 7, 1))
    for text in (report_sizing.sizing_text(old), report_sizing.sizing_markdown(old)):
        assert "Outdated prices, older than 180 days on 2026-07-01" in text
    assert "OUTDATED" in report_sizing.sizing_markdown(old)
    lines = json.loads(report_sizing.sizing_json(old))["ranked"][0]["price_lines"]
    assert all(line["outdated"] for line in lines)


# ---- machines and needs


def test_candidates_are_machines_and_upgrades_improve_them() -> None:
    every = candidates(10**11)
    assert len(every) == len(set(every)) and 40 <= len(every) <= 60
    assert all(canonical(text) == text for text in every)
    assert all(price_lines(text, load_prices()) for text in every)
    labels = {step.label for step in upgrades(CARD)}
    assert {"+32 GiB RAM", "one more rtx-5060-ti-16gb", "nvme-gen5 instead of nvme-gen4", "rtx-5090 as the card"} <= labels
    assert any("1TB" not in text and "TB" in text for text in candidates(3 * 10**12))  # a drive that holds the weights


@pytest.mark.parametrize("name", sorted(names("scenarios/needs")))
def test_bundled_needs_load(name: str) -> None:
    stated, where = load_needs(name)
    judge = Judge(stated, where)
    assert judge.formats() and stated.description


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"level": None}, "level"),
        ({"batch": {"requests": 1, "prompt_tokens": 1, "output_tokens": 2, "within": "1 h"}}, "level"),
        ({"prompt_tokens": 4096}, "prompt_tokens"),
        ({"quality": {"formats": ["int5"]}}, "formats"),
        ({"quality": {}}, "floor_bits"),
        ({"owned": "rtx-9999 + ryzen-9600x"}, "owned|rtx-9999"),
        ({"users": 0}, "users"),
        ({"level": {"decode_tok_s": 5, "ttft": 2}}, "ttft"),
    ],
)
def test_bad_needs_are_refused(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field) as caught:
        load_needs(needs(tmp_path, **changes))
    assert "needs.yaml" in str(caught.value)


def test_a_loss_that_is_known_bounds_the_formats(tmp_path: Path) -> None:
    def formats(model: str, most: float) -> list[str]:
        stated, where = load_needs(needs(tmp_path, models=[model], quality={"max_loss_percent": most}))
        return Judge(stated, where).formats()

    assert formats("mixtral-8x7b", 2.0) == ["bf16", "Q5_K", "Q4_K"]  # published: 0.56 and 1.74 %, Q3_K 6.82 %
    assert formats("tinymoe", 50.0) == ["bf16"]  # nothing is known below 16 bits, and nothing is guessed
    found = sized(tmp_path, quality={"max_loss_percent": 50})
    assert found.ranked[0].worst.quality["basis"] == "reference"
    assert "known to lose at most 50 %" in report_sizing.sizing_text(found) and "Quality: nothing is lost" in report_sizing.sizing_markdown(
        found
    )


def test_a_floor_above_every_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="floor_bits"):
        sized(tmp_path, quality={"floor_bits": 32})


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = needs(tmp_path, consider=[SMALL])
    assert run(["size", name, "-o", "json", "--date", "2025-07-01"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["recommended"] == canonical(SMALL) and data["within_budget"]
    assert all(v["command"].startswith("moesim run sizing ") for v in data["ranked"][0]["verdicts"])
    for way in ("text", "md", "csv"):
        assert run(["size", name, "-o", way, "--date", "2025-07-01"]) == 0
        assert canonical(SMALL) in capsys.readouterr().out
    assert run(["size", needs(tmp_path, level={"decode_tok_s": 1e9}, consider=[SMALL])]) == 3
    assert run(["size", name, "--date", "yesterday"]) == 2
    assert run(["size", "no-such-needs"]) == 2
    assert math.isfinite(data["ranked"][0]["cost"])


def test_faults_of_needs_and_prices_are_told_at_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, words in (({"models": ["tinymo"]}, "needs.yaml:2"), ({"budget": {"amount": 9, "currency": "JPY"}}, "budget.currency")):
        assert run(["size", needs(tmp_path, **changes)]) == 2
        err = capsys.readouterr().err
        assert words in err and "needs.yaml:" in err
    path = tmp_path / "prices.yaml"
    for name, currency, date in (("rtx-5090", "USD", "2030-01-01"), ("rtx-5090", "JPY", "2025-01-01"), ("rtx-9999", "USD", "2025-01-01")):
        path.write_text(
            f"currency: USD\nparts:\n  {name}: {{amount: 1, currency: {currency}, date: '{date}', basis: reported, source: me}}\n"
        )
        with pytest.raises(InputError, match=r"prices\.yaml:3"):
            load_prices(path, TODAY)


def test_a_profile_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "quickstart", "--profile", "nosuch.yaml"]) == 2
    err = capsys.readouterr().err
    assert "--profile" in err and "--set" not in err
