"""Owns batching: which sequences run in the next step and with how many tokens, who is admitted, who must give way.

It knows no clock and no cost. A step is formed in this order:

1. Each running sequence that has one token to compute (it decodes) gets it, in order of admission; then running prompts get chunks, in the
   same order, as far as ``step_tokens`` allows.
2. A sequence that needs a block where none is left makes the one admitted last give way, itself if need be: its blocks are freed and it
   computes its tokens anew later (recompute), or they are copied to main memory and back (swap; recompute where the swap space is full).
3. Unless somebody gave way, waiting requests are admitted, first come first served, while there are places, tokens and blocks for all that
   each has to compute. Who gave way waits at the front.

Static batching admits only where nothing runs. Chunked prefill beside decode rows as in Sarathi-Serve (arXiv:2403.02310), blocks and
pre-emption as in vLLM (arXiv:2309.06180).
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from moesim.errors import MoesimError
from moesim.serving.kv import KvPlan, KvPool, Prefix
from moesim.serving_spec import Serving


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way, which is itself and no other. ``known`` tokens are the prompt and those emitted; ``done`` of them are in the KV cache."""

    request: int
    known: int
    left: int  # tokens still to be emitted
    group: int = -1
    done: int = 0
    blocks: int = 0  # its own
    shared: int = 0  # of its group's prefix, at the front
    swapped: bool = False


@dataclass(slots=True)
class Formed:
    """A step: (request, first token, tokens) of each sequence in order; who emits, who ends; what is copied; how full the cache is."""

    parts: list[tuple[int, int, int]] = field(default_factory=list)
    emits: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    swapped_out: int = 0  # blocks
    swapped_in: int = 0
    gave_way: int = 0  # sequences
    kv_blocks: int = 0
    running: int = 0
    decodes: bool = True  # no prompt is in it


class Batcher:
    """Sequences that wait and run, and their blocks.

    Parameters
    ----------
    spec : Serving
    plan : KvPlan
    shareable : int
        Tokens of a group's prefix.
    debug : bool
        Check the invariants after every step.
    """

    def __init__(self, spec: Serving, plan: KvPlan, swap_blocks: int = 0, debug: bool = False) -> None:
        self.spec, self.plan, self.debug = spec, plan, debug
        self.pool = KvPool(plan, plan.blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swap_free = self.swap_blocks = swap_blocks
        self.steps = self.arrived = self.refused = self.ended = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def open(self) -> bool:
        """Whether a request that arrived now could be in the next step: places are left when all who wait have one."""
        if self.spec.batching == "static" and self.running:
            return False
        return len(self.waiting) < self.spec.most_sequences - len(self.running)

    def arrive(self, request: int, prompt: int, output: int, group: int = -1) -> bool:
        """Take a request; False if the cache could never hold it."""
        self.arrived += 1
        tokens = prompt + output - 1
        if tokens > self.plan.most_tokens or self.plan.blocks_for(tokens) > self.plan.blocks:
            self.refused += 1
            return False
        self.waiting.append(Sequence(request, prompt, output, group))
        return True

    # ---- a step

    def form(self) -> Formed:
        """Form the next step; what it computes counts as done."""
        out = Formed()
        batch: list[tuple[Sequence, int]] = []
        left = self.spec.step_tokens
        may_admit = self.spec.batching == "continuous" or not self.running
        for prompts in (False, True):
            for seq in tuple(self.running):
                need = seq.known - seq.done
                if (need > 1) is prompts and left and seq in self.running and self._grow(seq, seq.done + 1, out):
                    batch.append((seq, min(need, left)))
                    left -= batch[-1][1]
                    self._advance(*batch[-1])
        while may_admit and not out.gave_way and self.waiting and left and len(self.running) < self.spec.most_sequences:
            seq = self.waiting[0]
            if not self._admit(seq, out):
                break
            self.running.append(self.waiting.popleft())
            batch.append((seq, min(seq.known - seq.done, left)))
            left -= batch[-1][1]
            self._advance(*batch[-1])
        if not batch:
            raise MoesimError(f"no step can be formed of {len(self.running)} running and {len(self.waiting)} waiting sequences")
        out.parts = [(seq.request, seq.done - tokens, tokens) for seq, tokens in batch]
        out.decodes = all(tokens == 1 for _, _, tokens in out.parts)
        out.kv_blocks, out.running = self.pool.used, len(self.running)
        for seq, _ in batch:
            if seq.done == seq.known:
                out.emits.append(seq.request)
                seq.known += 1
                seq.left -= 1
                if not seq.left:
                    out.ends.append(seq.request)
                    self._release(seq)
                    self.running.remove(seq)
        self.ended += len(out.ends)
        self.steps += 1
        if self.debug:
            self.check(out)
        return out

    def _grow(self, seq: Sequence, tokens: int, out: Formed) -> bool:
        """Give a sequence the blocks for so many tokens; False if it had to give way itself."""
        while (missing := self.plan.blocks_for(tokens) - seq.blocks - seq.shared) > 0 and not self.pool.take(missing):
            last = self.running.pop()
            self._give_way(last, out)
            if last is seq:
                return False
        seq.blocks += max(missing, 0)
        return True

    def _give_way(self, seq: Sequence, out: Formed) -> None:
        blocks = seq.blocks + seq.shared
        seq.swapped = self.spec.preemption == "swap" and blocks <= self.swap_free and seq.done > 0
        if seq.swapped:
            self.swap_free -= blocks
            out.swapped_out += blocks
        self._release(seq)
        if seq.swapped:
            seq.blocks = blocks  # that it comes back with
        else:
            seq.done = 0
        self.waiting.appendleft(seq)
        out.gave_way += 1

    def _admit(self, seq: Sequence, out: Formed) -> bool:
        """Give a waiting sequence blocks for all that is known of it, but for those it shares; False if there are too few."""
        prefix = self.pool.prefixes.get(seq.group) if not seq.done else None
        shared = min(prefix.blocks, (seq.known - 1) // self.plan.block_tokens) if prefix is not None else 0
        if prefix is not None:
            prefix.users += 1  # it must not be taken for this very sequence
        if not self.pool.take(self.plan.blocks_for(seq.known) - shared):
            if prefix is not None:
                prefix.users -= 1
            return False
        if seq.swapped:
            self.swap_free += seq.blocks
            out.swapped_in += seq.blocks
            seq.swapped = False
        seq.blocks, seq.shared = self.plan.blocks_for(seq.known) - shared, shared
        if seq.group >= 0 and not seq.done:
            if prefix is None:
                prefix = self.pool.prefixes[seq.group] = Prefix(users=1)
            prefix.used_at = self.steps
            seq.done = shared * self.plan.block_tokens
        elif seq.done:
            seq.group = -1  # it came back with blocks of its own
        return True

    def _advance(self, seq: Sequence, tokens: int) -> None:
        """Count tokens as computed. Who is the first to compute whole blocks of its group's prefix hands them to the group."""
        seq.done += tokens
        if seq.group < 0:
            return
        prefix = self.pool.prefixes[seq.group]
        if seq.shared == prefix.blocks:
            more = min(seq.done, self.spec.prefix_tokens) // self.plan.block_tokens - seq.shared
            if more > 0:
                prefix.blocks += more
                seq.shared += more
                seq.blocks -= more

    def _release(self, seq: Sequence) -> None:
        self.pool.give(seq.blocks)
        seq.blocks = seq.shared = 0
        if seq.group >= 0:
            prefix = self.pool.prefixes[seq.group]
            prefix.users -= 1
            prefix.used_at = self.steps
            if not prefix.users and not prefix.blocks:
                del self.pool.prefixes[seq.group]

    # ---- invariants

    def check(self, step: Formed) -> None:
        """Check the numbered invariants; a MoesimError says which one is broken.

        1. Requests: arrived = refused + waiting + running + ended.
        2. Blocks: all = free + those of running sequences + those of prefixes; a prefix has as many users as running sequences of its group.
        3. Each running sequence holds the blocks of what is done, and no more than one beyond what is known.
        4. A step has at most ``step_tokens`` tokens and ``most_sequences`` sequences, each once, each with a token at least.
        5. Who emits has computed all that is known; who ends has emitted all; nobody runs who has.
        6. Swap space: all = free + blocks of those swapped out; who is neither running nor swapped has no blocks.
        """
        plan = self.plan
        held = sum(seq.blocks for seq in self.running)
        users: dict[int, int] = {}
        for seq in self.running:
            users[seq.group] = users.get(seq.group, 0) + 1
        tokens = [count for _, _, count in step.parts]
        away = [seq.blocks for seq in self.waiting if seq.swapped]
        holds = {
            1: self.arrived == self.refused + len(self.waiting) + len(self.running) + self.ended,
            2: plan.blocks == self.pool.free + held + sum(p.blocks for p in self.pool.prefixes.values()) and self.pool.free >= 0
            and all(p.users == users.get(group, 0) for group, p in self.pool.prefixes.items()),
            3: all(plan.blocks_for(s.done) <= s.blocks + s.shared <= plan.blocks_for(s.known) + 1 for s in self.running),
            4: sum(tokens) <= self.spec.step_tokens and min(tokens) > 0 and len(step.parts) <= self.spec.most_sequences
            and len({request for request, _, _ in step.parts}) == len(step.parts),
            5: set(step.ends) <= set(step.emits) and all(s.left > 0 and s.done < s.known for s in self.running),
            6: self.swap_blocks == self.swap_free + sum(away) and all(not s.blocks or s.swapped for s in self.waiting),
        }  # fmt: skip
        for number, true in holds.items():
            if not true:
                raise MoesimError(f"invariant {number} of the batcher is broken in step {self.steps - 1}")

    # ---- state

    def state(self) -> dict[str, Any]:
        """Everything that ``restore`` needs, as plain data."""
        return {
            "waiting": [asdict(seq) for seq in self.waiting], "running": [asdict(seq) for seq in self.running], "free": self.pool.free,
            "prefixes": [[group, asdict(prefix)] for group, prefix in self.pool.prefixes.items()], "swap_free": self.swap_free,
            "counts": [self.steps, self.arrived, self.refused, self.ended],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a state of a batcher of the same scenario."""
        self.waiting = deque(Sequence(**seq) for seq in state["waiting"])
        self.running = [Sequence(**seq) for seq in state["running"]]
        self.pool.free, self.swap_free = state["free"], state["swap_free"]
        self.pool.prefixes = {group: Prefix(**prefix) for group, prefix in state["prefixes"]}
        self.steps, self.arrived, self.refused, self.ended = state["counts"]
