"""Refits the fitted rates of moesim/runtimes/attained.yaml to a folder of public measured runs, and writes what cross-validation gives.

    python benchmarks/fit_field.py ../shared/field_runs            # prints
    python benchmarks/fit_field.py ../shared/field_runs --write    # writes attained.yaml (values, spreads), attained_without_host.csv and
                                                                  # docs/field-coefficients.md

Method: robust least squares (Huber, Levenberg-Marquardt) on the logarithm of predicted over measured speed, in the logarithm of the rates, with
a prior (a factor of 1.5) around what physics and single public reports suggest. Rows of one series of runs share a deviation (the host's, the
model's), so residuals are whitened within a series: a sweep over depths says much about the growth with depth and little about the level.
Series of one machine and placement together weigh as the square root of their number. Predictions are the program's own, nothing is fitted to
a formula beside it. Leave-host-group-out fits start from the full fit and keep its Jacobian (chord iterations).
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter

import numpy as np

from moesim import resources, text_table
from moesim.backtest import backtest, score
from moesim.backtest.data import Lacking, read_field_runs
from moesim.backtest.run import FieldCase, FieldCases
from moesim.runtimes import Rates, attained_file, held_out, load_rates

PRIOR = {  # where the fit starts and what it is drawn to where rows say little
    "client_memory_share": 0.85, "server_memory_share": 0.55, "dual_server_memory_share": 0.4, "cpu_flops": 30e9, "server_core_share": 0.5,
    "hand_over": 1e-4, "gpu_memory_share": 0.85, "launch_graphs": 5e-6, "launch": 8e-6, "old_gpu_launch": 2.0,
    "gpu_vector_attention_share": 0.045, "gpu_tensor_attention_share": 0.7,
    "gpu_unfused_attention_share": 0.5, "gpu_unpacking_attention_share": 0.7, "gpu_cache_traffic": 1.2, "cpu_attention_share": 2.4,
    "cpu_serial_head_token": 1e-7, "gpu_prefill_share": 0.25, "gpu_prefill_attention_share": 0.3, "cpu_prefill_flops": 1.6e11,
    "cpu_prefill_plain_share": 0.33, "pageable_bytes_per_s": 1e10,
}  # fmt: skip
PRIOR_SD = np.log(1.5)
NOISE = {  # spread of a row within its series of runs, and of the series: a sweep over depths shares most of its deviation
    "decode": (0.06, 0.15), "batched decode": (0.06, 0.15), "prefill": (0.2, 0.2),
}  # fmt: skip
NOT_FITTED = ("ssd", "gpu_cpu_layers")  # what pages in and out hides everything else
FEWEST = 10  # rows from which an interval is taken
HUBER = 1.0  # in units of the noise
SAME_CHIP = (("GB10",),)  # hosts whose cards carry such a name are one chip, and are left out together


class Fit:
    """The cases of a folder and the fit of the rates to them."""

    def __init__(self, cases: list[FieldCase], fixed: dict[str, float]) -> None:
        self.cases, self.fixed, self.names = cases, fixed, list(PRIOR)
        self.measured = np.log([c.row.value for c in cases])
        self.noise, shared = np.array([NOISE[c.mode] for c in cases]).T
        kinds = [(c.machine.name, c.placement, c.mode == "prefill") for c in cases]
        series = [(*kind, c.row.text("run_id")) for kind, c in zip(kinds, cases, strict=True)]
        number = {s: i for i, s in enumerate(dict.fromkeys(series))}
        self.series = np.array([number[s] for s in series])
        sizes = np.bincount(self.series)
        self.common = 1 - 1 / np.sqrt(1 + sizes[self.series] * (shared / self.noise) ** 2)
        self.sizes = sizes[self.series]
        of_kind = Counter(s[:3] for s in number)
        self.weight = np.array([1 / np.sqrt(of_kind[kind]) for kind in kinds]) / self.noise**2
        self.weight[[c.placement in NOT_FITTED for c in cases]] = 0.0
        self.hosts = [host_group(c) for c in cases]
        self.x0 = np.log([PRIOR[n] for n in self.names])

    def rates(self, x: np.ndarray) -> Rates:
        return Rates(self.fixed | dict(zip(self.names, np.exp(x).tolist(), strict=True)), {})

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Log of predicted over measured speed, (rows,)."""
        rates = self.rates(x)
        return np.array([np.log(c.tokens_per_s(sum(c.seconds(rates).values()))) for c in self.cases]) - self.measured

    def within(self, values: np.ndarray) -> np.ndarray:
        """Take most of its mean from each series, so that what remains is independent (rows of one series share a deviation)."""
        sums = np.zeros((self.series.max() + 1, *values.shape[1:]))
        np.add.at(sums, self.series, values)
        means = sums[self.series] / self.sizes.reshape(-1, *[1] * (values.ndim - 1))
        return values - self.common.reshape(-1, *[1] * (values.ndim - 1)) * means

    def cost(self, r: np.ndarray, x: np.ndarray, keep: np.ndarray) -> float:
        limit = HUBER * self.noise
        r = self.within(r)
        size = np.abs(r)
        loss = np.where(size < limit, r**2 / 2, limit * (size - limit / 2))
        return float((keep * self.weight * loss).sum() + ((x - self.x0) ** 2).sum() / PRIOR_SD**2 / 2)

    def jacobian(self, x: np.ndarray, r: np.ndarray, step: float = 1e-3) -> np.ndarray:
        return np.array([(self.residuals(x + step * np.eye(len(x))[k]) - r) / step for k in range(len(x))]).T

    def solve(self, jac: np.ndarray, r: np.ndarray, x: np.ndarray, keep: np.ndarray, damping: float) -> np.ndarray:
        jac, r = self.within(jac), self.within(r)
        w = keep * self.weight * np.where(np.abs(r) < HUBER * self.noise, 1.0, HUBER * self.noise / np.maximum(np.abs(r), 1e-12))
        h = (jac * w[:, None]).T @ jac + np.eye(len(x)) / PRIOR_SD**2
        g = (jac * w[:, None]).T @ r + (x - self.x0) / PRIOR_SD**2
        return np.clip(-np.linalg.solve(h + damping * np.diag(np.diag(h)), g), -0.4, 0.4)

    def full(self, x: np.ndarray, rounds: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fit all rows. Returns the log rates, the residuals and the Jacobian there."""
        keep = np.ones(len(self.cases))
        r = self.residuals(x)
        now, damping = self.cost(r, x, keep), 0.01
        for i in range(rounds):
            jac = self.jacobian(x, r)
            before = now
            for _ in range(8):
                trial = x + self.solve(jac, r, x, keep, damping)
                r_trial = self.residuals(trial)
                cost = self.cost(r_trial, trial, keep)
                if cost < now:
                    x, r, now, damping = trial, r_trial, cost, damping / 4
                    break
                damping *= 5
            print(f"round {i}: cost {now:.2f}", file=sys.stderr)
            if before - now < 3e-4 * before:
                break
        return x, r, self.jacobian(x, r)

    def without(self, host: str, x: np.ndarray, r: np.ndarray, jac: np.ndarray, rounds: int = 3) -> np.ndarray:
        """Fit without one host group, from the full fit, by chord iterations."""
        keep = np.array([h != host for h in self.hosts], float)
        now = self.cost(r, x, keep)
        for _ in range(rounds):
            step = self.solve(jac, r, x, keep, 0.0)
            for size in (1.0, 0.5, 0.2):
                r_trial = self.residuals(x + size * step)
                cost = self.cost(r_trial, x + size * step, keep)
                if cost < now:
                    break
            else:
                break
            gained, now = now - cost, cost
            x, r = x + size * step, r_trial
            if gained < 3e-4 * now:
                break
        return x


def host_group(case: FieldCase) -> str:
    """The host group that a case is left out with."""
    for names in SAME_CHIP:
        if any(name in case.machine.gpu_name for name in names):
            return names[0]
    return case.machine.host


def load(folder: str) -> tuple[list[FieldCase], dict[str, float]]:
    rates = load_rates()
    builder, cases = FieldCases(read_field_runs(folder)), []
    for row in builder.data.runs:
        try:
            cases.append(builder.case(row, rates))
        except Lacking:
            continue
    return cases, {name: value for name, value in rates.values.items() if name not in PRIOR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--write", action="store_true", help="write attained.yaml and attained_without_host.csv")
    args = parser.parse_args()
    cases, fixed = load(args.folder)
    fit = Fit(cases, fixed)
    x, r, jac = fit.full(fit.x0.copy())
    held = {host: fit.without(host, x, r, jac) for host in sorted(set(fit.hosts))}
    out = np.full(len(cases), np.nan)
    for host, xh in held.items():
        mine = np.array([h == host for h in fit.hosts])
        out[mine] = fit.residuals(xh)[mine]
    summary(cases, out)
    for name, value in zip(fit.names, np.exp(x), strict=True):
        spread = np.std([np.exp(xh[fit.names.index(name)]) for xh in held.values()]) / value
        print(f"{name:32s} {value:12.4g}  moves by {100 * spread:.0f} % between folds")
    if args.write:
        write(fit, x, held)
        attained_file.cache_clear()
        write_table(fit, held)
        held_out.cache_clear()
        write_spreads(args.folder)


def summary(cases: list[FieldCase], errors: np.ndarray) -> None:
    """Print the cross-validated error by mode and placement."""
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for case, error in zip(cases, errors.tolist(), strict=True):
        groups.setdefault((case.mode, case.placement), []).append((float(np.exp(error)), 1.0, case.machine.name))
    for (mode, placement), pairs in sorted(groups.items()):
        s = score(pairs)
        print(
            f"{mode:15s} {placement:16s} n {s.n:4d}  median {s.median_ape:.1%}  mean over machines {s.machine_mean:.1%}  within 20 %: {s.within_20:.0%}"
        )


def write(fit: Fit, x: np.ndarray, held: dict[str, np.ndarray]) -> None:
    """Write values into attained.yaml, line by line, and the rates without each host."""
    folder = resources.folder("runtimes")
    path = folder / "attained.yaml"
    text = path.read_text(encoding="utf-8")
    for name, value in zip(fit.names, np.exp(x), strict=True):
        text, count = re.subn(rf"(\n  {name}:\n    value: )[^\n]+", lambda m, v=value: m[1] + plain(v), text)
        assert count == 1, name
    path.write_text(text, encoding="utf-8")
    names = {host: {c.machine.host for c, h in zip(fit.cases, fit.hosts, strict=True) if h == host} for host in held}
    with (folder / "attained_without_host.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["host", *fit.names])
        for host, xh in held.items():
            for name in sorted(names[host]):
                rows.writerow([name, *(f"{v:.5g}" for v in np.exp(xh))])


def write_table(fit: Fit, held: dict[str, np.ndarray]) -> None:
    """Write docs/field-coefficients.md: every rate, where it comes from, and how far a fitted one moves when a host is left out."""
    rates = attained_file().rates
    fitted = sum(rate.basis == "fitted" for rate in rates.values())
    lines = ["# What engines attain", "", f"Written by `benchmarks/fit_field.py`. {fitted} coefficients rest on public measured runs (basis *fitted*), {len(PRIOR)} by the fit and the rest by",
             "hand; *folds* is how far a value moves, as a standard deviation, when the hosts are left out one after the other.", ""]  # fmt: skip
    rows = []
    for name, rate in rates.items():
        folds = f"{100 * np.std([x[fit.names.index(name)] for x in held.values()]):.0f} %" if name in PRIOR else "-"
        prior = f"{PRIOR[name]:.4g}" if name in PRIOR else "-"
        rows.append([name, f"{rate.value:.4g} {rate.unit}".strip(), rate.basis, prior, folds, rate.meaning, rate.source])
    lines += text_table.markdown_table(["coefficient", "value", "basis", "prior", "folds", "meaning", "source"], rows)
    (resources.folder("runtimes").parents[1] / "docs" / "field-coefficients.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_spreads(folder: str) -> None:
    """Write how wide 80 % of cross-validated errors spread, cold and warm, of each placement and mode.

    A host weighs as the square root of its number of rows, so that an interval fits the next host rather than the longest sweep.
    """
    path = resources.folder("runtimes") / "attained.yaml"
    text = path.read_text(encoding="utf-8").partition("spreads:")[0]
    data = read_field_runs(folder)
    errors: dict[tuple[str, str], dict[bool, list[tuple[float, str]]]] = {}
    for warm in (False, True):
        for p in backtest(data, warm=warm).scored:
            found = errors.setdefault((p.case.placement, p.case.mode), {}).setdefault(warm, [])
            found.append((abs(p.log_error), p.case.machine.host))
    lines = ["spreads:"]
    for (placement, mode), by_use in sorted(errors.items()):
        if len(by_use[False]) < FEWEST:  # the widest interval of its mode stands in
            continue
        cold, warm_ratio = (max(np.exp(_spread(by_use.get(w) or by_use[False])), 1.05) for w in (False, True))
        lines.append(f"  - {{placement: {placement}, mode: {mode}, cold: {cold:.3f}, warm: {warm_ratio:.3f}}}")
    path.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


def _spread(errors: list[tuple[float, str]]) -> float:
    """The error that 80 % of the weight lies below."""
    rows = Counter(host for _, host in errors)
    ranked = sorted(errors)
    weight = np.cumsum([rows[host] ** -0.5 for _, host in ranked])
    return ranked[int(np.searchsorted(weight, 0.8 * weight[-1]))][0]


def plain(value: float) -> str:
    """A number as strict YAML takes it: no exponent."""
    text = f"{float(f'{value:.4g}'):.12f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


if __name__ == "__main__":
    main()
