"""Owns the blocks of the KV cache: how many there are, who holds them, which are kept once for all requests of a shared prefix.

A block is room for ``block_tokens`` tokens in all layers that keep every token: 1 where ``memory.kv`` is live, ``kv_block_tokens`` where it
is paged, and where it is maximum (contiguous) the whole planned context, so that a sequence holds exactly one. What sliding windows and
recurrent states take does not grow with the context; it is set aside for ``most_sequences`` sequences.

Prefixes: whole blocks of a shared prefix belong to its group. They stay after their last user has gone, until room is needed; then the
group that was used longest ago leaves first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moesim.errors import InputError, MoesimError
from moesim.layout import Layout


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Blocks that the ledger's KV cache has room for; bytes by tier."""

    blocks: int
    block_tokens: int
    most_tokens: int  # the longest context of one sequence
    block_bytes: dict[str, int]
    fixed_bytes: dict[str, int]  # of one sequence: windows and recurrent states

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def bytes(self, blocks: int, sequences: int) -> dict[str, int]:
        """What blocks and running sequences take, by tier."""
        return {tier: blocks * size + sequences * self.fixed_bytes[tier] for tier, size in self.block_bytes.items()}


def kv_plan(layout: Layout, most_sequences: int) -> KvPlan:
    """Divide the ledger's KV cache into blocks.

    Raises
    ------
    InputError
        If not even one block fits.
    """
    memory = layout.scenario.memory
    block_tokens = {"maximum": layout.context_tokens, "live": 1, "paged": memory.kv_block_tokens}[memory.kv]
    per_token, fixed, room = dict[str, int](), dict[str, int](), list[int]()
    for tier in layout.kv_tiers:
        per_token[tier], fixed[tier] = layout.kv_of_sequence(tier)
        budget = sum(line.bytes for line in layout.ledger.lines if line.tier == tier and line.pool == "kv" and line.name == "KV cache")
        left = budget - most_sequences * fixed[tier]
        if left < 0 or per_token[tier] and left < block_tokens * per_token[tier]:
            need = most_sequences * fixed[tier] + block_tokens * per_token[tier]
            raise InputError("memory.kv_bytes", expected=f"at least {need} bytes of KV cache in {tier}, for one block and {most_sequences} sequences",
                             got=str(budget), fix="give the KV cache more room, or lower serving.most_sequences")  # fmt: skip
        if per_token[tier]:
            room.append(left // (block_tokens * per_token[tier]))
    blocks = min(room) if room else most_sequences * -(-layout.context_tokens // block_tokens)  # only recurrent states
    return KvPlan(blocks, block_tokens, layout.context_tokens, {t: block_tokens * size for t, size in per_token.items()}, fixed)


@dataclass(slots=True)
class Prefix:
    """Blocks of the shared prefix of one group."""

    blocks: int = 0
    users: int = 0
    used_at: int = -1  # step


@dataclass(slots=True)
class KvPool:
    """Blocks in use and free; sequences hold theirs as a count."""

    plan: KvPlan
    free: int
    prefixes: dict[int, Prefix] = field(default_factory=dict)

    def take(self, blocks: int) -> bool:
        """Take free blocks, where need be those of prefixes that nobody uses; False, and nothing changed, if there are too few."""
        if blocks <= self.free:
            self.free -= blocks
            return True
        idle = [group for group, prefix in self.prefixes.items() if not prefix.users]
        if self.free + sum(self.prefixes[group].blocks for group in idle) < blocks:
            return False
        for group in sorted(idle, key=lambda group: (self.prefixes[group].used_at, group)):
            if self.free >= blocks:
                break
            self.free += self.prefixes.pop(group).blocks
        self.free -= blocks
        return True

    def give(self, blocks: int) -> None:
        self.free += blocks
        if self.free > self.plan.blocks:
            raise MoesimError(f"invariant 2: {self.free} free blocks of {self.plan.blocks}")

    @property
    def used(self) -> int:
        return self.plan.blocks - self.free
