"""Owns what machines cost: the price table of parts, and the lines that a composition's price adds up from.

Every line keeps the date, basis and source of its price. A machine of which one part has no price has none. Ages are told against a day
that the caller gives; nothing here reads a clock.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from moesim import config
from moesim.config import Spec
from moesim.errors import InputError, did_you_mean
from moesim.hardware.catalogue import GIB, Drive, folder, part_names, size_text
from moesim.hardware.grammar import Parts, read_parts
from moesim.hardware.parts import Price
from moesim.hardware.parts import problem as refuse

OLD_DAYS = 180
_REGISTERED = ("workstation", "server-single", "server-dual")


class PriceTable(Spec):
    """``prices.yaml``. ``rates`` give the value of one unit of another currency in ``currency``."""

    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    rates: dict[str, Annotated[float, Field(gt=0)]] = {}
    included: list[str] = []  # parts that come with a computer and have no price of their own
    parts: dict[str, Price] = {}
    memory: dict[str, Price] = {}
    hosts: dict[str, Price] = {}

    @model_validator(mode="after")
    def _check(self) -> PriceTable:
        known = part_names()
        for name in self.parts:
            if name.partition(":")[0] not in known:
                raise refuse(("parts", name), "parts of the catalogue", f'"{name}"', did_you_mean(name.partition(":")[0], known))
        for at, names in (("memory", ("ddr3", "ddr4", "ddr5")), ("hosts", ("desktop", "laptop", *_REGISTERED))):
            for name in getattr(self, at):
                if name.removesuffix("-server" if at == "memory" else "") not in names:
                    raise refuse((at, name), f"one of {', '.join(names)}", f'"{name}"')
        for at, name, price in self.every():
            if price.currency != self.currency and price.currency not in self.rates:
                raise refuse(
                    (at, name),
                    f"prices in {self.currency}, or a rate",
                    f"{name} in {price.currency}",
                    f"add rates: {{{price.currency}: ...}}",
                )
        return self

    def every(self) -> list[tuple[str, str, Price]]:
        """Every price with its place: parts, memory or hosts, and its name there."""
        return [(at, name, price) for at in ("parts", "memory", "hosts") for name, price in getattr(self, at).items()]

    def worth(self, price: Price) -> float:
        """Return a price in the table's currency.

        Raises
        ------
        InputError
            If there is no rate for its currency.
        """
        if price.currency == self.currency:
            return price.amount
        if price.currency not in self.rates:
            raise InputError("prices", expected=f"a rate of {price.currency} in {self.currency}", got="none", fix="add it to rates")
        return price.amount * self.rates[price.currency]


@dataclass(frozen=True, slots=True)
class PriceLine:
    """One line of a machine's price: ``count`` units of ``what`` at ``each`` in the table's currency; None where nobody stated a price."""

    what: str
    count: float
    each: float | None
    price: Price | None

    @property
    def amount(self) -> float | None:
        return None if self.each is None else self.each * self.count

    def age_days(self, today: datetime.date) -> int:
        """How old the price is; 0 where there is none."""
        return 0 if self.price is None else (today - datetime.date.fromisoformat(self.price.date)).days

    def outdated(self, today: datetime.date) -> bool:
        return self.age_days(today) > OLD_DAYS


def load_prices(path: Path | None = None, today: datetime.date | None = None) -> PriceTable:
    """Return the bundled table, with what a user's file states laid over it; a price of the file that is dated after ``today`` is refused.

    Raises
    ------
    InputError
        With ``file:line``, if an entry is wrong, or the file counts in another currency without a rate for the bundled one.
    """
    bundled = config.build(PriceTable, config.read_yaml(folder() / "prices.yaml"))
    if path is None:
        return bundled
    document = config.read_yaml(path)
    own = config.build(PriceTable, document)
    for at, name, price in own.every():
        if today is not None and price.date > str(today):
            where = document.where((at, name, "date"))
            raise InputError(
                f"{at}.{name}.date", expected=f"a day up to {today}", got=price.date, fix="state the day of the price", where=where
            )
    if own.currency != bundled.currency and bundled.currency not in own.rates:
        raise InputError("rates", expected=f"a rate of {bundled.currency} in {own.currency}", got="none", where=document.where(("currency",)),
                         fix=f"add rates: {{{bundled.currency}: ...}}, as other prices are in {bundled.currency}")  # fmt: skip
    merged = {name: {**getattr(bundled, name), **getattr(own, name)} for name in ("parts", "memory", "hosts")}
    return PriceTable(currency=own.currency, rates=own.rates, included=own.included or bundled.included, **merged)


def price_lines(text: str, table: PriceTable) -> list[PriceLine]:
    """Return what a composition's price adds up from, in the order of its parts."""
    chosen = read_parts(text)
    out = []
    for name, count, spec in chosen.counted():
        if name in table.included and name not in table.parts:
            continue
        sized = f"{name}:{size_text(chosen.socs[name][1])}" if name in chosen.socs else name
        price = table.parts.get(sized) or table.parts.get(name) or spec.price
        if name in chosen.socs and sized not in table.parts and chosen.socs[name][1] != max(chosen.socs[name][0].memory):
            price = table.parts.get(name)  # the catalogue's price is of the largest memory
        many: float = count
        if isinstance(spec, Drive):
            many = chosen.drives[name][1] / spec.capacity.value
        out.append(PriceLine(sized, many, table.worth(price) if price else None, price))
    for ram in chosen.ram:
        kind = f"ddr{ram.gen}" + ("-server" if _platform(chosen) in _REGISTERED else "")
        price = table.memory.get(kind)
        out.append(PriceLine(f"{kind} per GiB", ram.bytes / GIB, table.worth(price) if price else None, price))
    if chosen.cpus:
        price = table.hosts.get(_platform(chosen))
        out.append(PriceLine(f"{_platform(chosen)} host", 1, table.worth(price) if price else None, price))
    return out


def _platform(chosen: Parts) -> str:
    return next(iter(chosen.cpus.values())).platform if chosen.cpus else "soc"


def total(lines: list[PriceLine]) -> float | None:
    """Return the sum of lines; None if one has no price."""
    amounts = [line.amount for line in lines]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def upgrade_lines(lines: list[PriceLine], owned: list[PriceLine]) -> list[PriceLine]:
    """Return what must be bought beside what is owned: parts that are owned in the same number cost nothing, what is left over earns nothing."""
    have = {line.what: line.count for line in owned}
    out = []
    for line in lines:
        more = line.count - have.get(line.what, 0.0)
        if more > 0:
            out.append(PriceLine(line.what, more, line.each, line.price))
    return out
