"""Hand-computed timelines, for every engine. Nothing in here was produced by running one.

A case is a small schedule with explicit costs and the exact (start, end) of every task in picoseconds. A channel of
``PER_PS`` = 1e12 units/s carries one unit (byte) per picosecond, so that the arithmetic stays in whole numbers.
In the comments ``t3`` is task 3 and ``100B`` a flow of 100 bytes. A cause is (task, why), see moesim/timeline.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from timeline_program import PER_PS, Case, Program, program

from moesim.schedule import Dep, Kind
from moesim.timeline import CAUSE_HEAD_OF_LINE as HOL

DATA, SLOT, BUFFER, QUEUE, LANE = Dep.DATA, Dep.SLOT, Dep.BUFFER, Dep.QUEUE, Dep.LANE

Causes = Mapping[int, tuple[int, int]]
CASES: list[Case] = []


def case(name: str, p: Program, *expected: tuple[int, int], causes: Causes | None = None, derated: bool = False) -> None:
    CASES.append(Case(name, p.lanes, p.pieces(), expected, causes or {}, None if derated else p.pieces(())))


# --- fifo ---------------------------------------------------------------------------------------------------------------

p = program("gpu", "ssd")
p.task("gpu", 50)
p.task("ssd", 10, after=[0])
p.task("ssd", 20)
case(
    "fifo blocks at width 1", p,
    (0, 50),
    (50, 60),  # waits for t0: 50 + 10
    (60, 80),  # ready at 0 and the lane idle, but t1 is before it in the queue: 60 + 20
    causes={0: (-1, DATA), 1: (0, DATA), 2: (1, LANE)},
)  # fmt: skip

p = program("gpu", "ssd*2")
p.task("gpu", 50)
p.task("ssd", 30)
p.task("ssd", 10, after=[0])
p.task("ssd", 5)
case(
    "fifo blocks at width 2", p,
    (0, 50),
    (0, 30),
    (50, 60),  # t0 ends at 50
    (50, 55),  # one server idle since 0, the other since 30, but t2 is at the head until 50
    causes={1: (-1, DATA), 2: (0, DATA), 3: (2, HOL)},
)  # fmt: skip

p = program("ssd*2")
for latency in (30, 10, 15, 20):
    p.task("ssd", latency)
case(
    "fifo at width 2 without blocking", p,
    (0, 30), (0, 10),  # two servers
    (10, 25),  # after t1: 10 + 15
    (25, 45),  # after t2 (25 < 30): 25 + 20
    causes={2: (1, LANE), 3: (2, LANE)},
)  # fmt: skip

p = program("gpu", "ssd*2")
p.task("ssd", 50)
p.task("gpu", 50)
p.task("ssd", 10, after=[1])
p.task("ssd", 20)
case(
    "head of line with a server idle and one freed at the same instant", p,
    (0, 50), (0, 50),
    (50, 60),  # t1 ends at 50
    (50, 70),  # what held it was t2, not the server that t0 frees at 50: the other one was idle all along
    causes={2: (1, DATA), 3: (2, HOL)},
)  # fmt: skip

# --- priority -----------------------------------------------------------------------------------------------------------

p = program("h2d priority")
for layer in (0, 3, 1, 2):
    p.task("h2d", 10, layer=layer)
case(
    "priority by layer of use", p,
    (0, 10),  # layer 0
    (30, 40),  # layer 3 last
    (10, 20),  # layer 1
    (20, 30),  # layer 2
)  # fmt: skip

p = program("gpu", "h2d priority")
p.task("h2d", 100, use=(0, 0))
p.task("h2d", 10, use=(0, 1), prefetch=True)
p.task("gpu", 40)
p.task("h2d", 10, after=[2], use=(0, 2))
p.task("h2d", 10, after=[2], use=(0, 1))
p.task("h2d", 10, use=(0, 1), prefetch=True)
p.task("h2d", 10, use=(1, 0), prefetch=True)
case(
    "a queued prefetch that has become urgent is not overtaken", p,
    (0, 100),  # use (0, 0): the soonest of those that are ready at 0
    (110, 120),  # prefetch for layer 1: after the demand for layer 1, before the demand for layer 2
    (0, 40),
    (130, 140),  # demand for layer 2: after both prefetches for layer 1
    (100, 110),  # demand for layer 1 is first of all, though its id is larger
    (120, 130),  # the second prefetch for layer 1, by id
    (140, 150),  # next step last
)  # fmt: skip

p = program("gpu", "h2d priority")
p.task("h2d", 100, use=(1, 0), prefetch=True)
p.task("gpu", 10)
p.task("h2d", 5, after=[1], use=(0, 1))
case(
    "no preemption", p,
    (0, 100),
    (0, 10),
    (100, 105),  # ready at 10, the prefetch under way is not interrupted
    causes={2: (0, LANE)},
)  # fmt: skip

p = program("gpu", "h2d priority")
p.task("h2d", 50, use=(0, 0))
p.task("gpu", 30)
p.task("h2d", 7, after=[1], use=(0, 1))
p.task("h2d", 9, use=(0, 1))
case(
    "tie-break by id, not by the time of becoming ready", p,
    (0, 50),
    (0, 30),
    (50, 57),  # ready at 30, id 2
    (57, 66),  # ready at 0, id 3
)  # fmt: skip

p = program("gpu*2", "h2d*2 priority")
p.task("gpu", 10)
p.task("gpu", 10)
p.task("h2d", 20, use=(0, 9))
p.task("h2d", 4, after=[0], use=(0, 5))
p.task("h2d", 6, after=[1], use=(0, 4))
p.task("h2d", 8, after=[0], use=(0, 4))
case(
    "priority decides among all that became ready at one instant", p,
    (0, 10), (0, 10),
    (0, 20),
    (20, 24),  # layer 5: last, on the server that t2 frees at 20
    (10, 16),  # layer 4, the smaller id: the server that is free at 10
    (16, 24),  # layer 4: on the server that t4 frees
)  # fmt: skip

# --- instants -----------------------------------------------------------------------------------------------------------

p = program("a", "b", "c")
p.task("a", 10)
p.task("b", 10)
p.task("c", 5, after=[0, 1])
p.task("a", 5, after=[1])
p.task("b", 5, after=[0])
p.task("a", 1, after=[2, 3, 4])
case(
    "ends and grants of one instant across lanes", p,
    (0, 10), (0, 10),
    (10, 15), (10, 15), (10, 15),  # both ends are retired before any lane grants, whatever the lane order
    (15, 16),
    causes={2: (1, DATA), 3: (1, DATA), 4: (0, DATA), 5: (4, DATA)},  # the largest id of those that end together
)  # fmt: skip

p = program("gpu", "npu", "host")
p.task("gpu", 10)
p.task("gpu", 0, after=[0])
p.task("npu", 0, after=[1])
p.task("gpu", 0, after=[2])
p.task("npu", 5, after=[3])
p.task("host", 0)
p.task("host", 7, after=[5])
case(
    "a chain of tasks of no duration within one instant", p,
    (0, 10),
    (10, 10), (10, 10), (10, 10),
    (10, 15),  # 10 + 0 + 0 + 0, then 5
    (0, 0),  # also at time 0
    (0, 7),
    causes={1: (0, DATA), 2: (1, DATA), 3: (2, DATA), 4: (3, DATA), 6: (5, DATA)},
)  # fmt: skip

p = program("gpu", "npu")
p.task("gpu", 10)
p.task("npu", 10)
p.task("gpu", 0, after=[0], kind=Kind.COMBINE)
p.end_step()  # the gate is t2, of no duration: the step border lies inside an instant
p.task("npu", 0)
p.task("gpu", 3, after=[1, 3])
case("a step border within an instant", p, (0, 10), (0, 10), (10, 10), (10, 10), (10, 13), causes={3: (2, DATA), 4: (3, DATA)})

# --- layer-sets, slots, prefetch ----------------------------------------------------------------------------------------

p = program("gpu", "h2d")
p.task("gpu", 5, kind=Kind.ROUTER)
p.task("h2d", 10, after=[0])  # expert 0 into slot 0
p.task("h2d", 10, after=[0])  # expert 1 into slot 1
p.task("gpu", 20, after=[0, 1], kind=Kind.FFN)
p.task("gpu", 20, after=[0, 2], kind=Kind.FFN)
p.task("h2d", 10, after=[0], slot=[1, 3])  # expert 2 into slot 0: after its load and the FFN of expert 0
p.task("h2d", 10, after=[0], slot=[2, 4])  # expert 3 into slot 1
p.task("gpu", 20, after=[0, 5], kind=Kind.FFN)
p.task("gpu", 20, after=[0, 6], kind=Kind.FFN)
p.task("gpu", 2, after=[3, 4, 7, 8], kind=Kind.COMBINE)
case(
    "a layer-set of four in two waves through two slots", p,
    (0, 5),
    (5, 15), (15, 25),  # wave 1, one load after the other
    (15, 35), (35, 55),  # FFN 0 when loaded (15); FFN 1 loaded at 25, gpu free at 35
    (35, 45),  # slot 0 free at 35
    (55, 65),  # slot 1 free at 55
    (55, 75),  # loaded at 45, gpu free at 55
    (75, 95),  # loaded at 65, gpu free at 75
    (95, 97),
    causes={5: (3, SLOT), 6: (4, SLOT), 7: (4, LANE), 9: (8, DATA)},
)  # fmt: skip

p = program("gpu", "h2d*2")
p.task("gpu", 5, kind=Kind.ATTENTION)
p.task("gpu", 5, after=[0], kind=Kind.ROUTER)
p.task("h2d", 30, after=[1], use=(0, 1), prefetch=True)  # a wrong prediction, into slot 0
p.task("gpu", 5, after=[1], kind=Kind.ATTENTION)
p.task("gpu", 5, after=[3], kind=Kind.ROUTER)
p.task("h2d", 20, after=[4], slot=[2])  # the demand load evicts it: it was never used, so only its own load counts
p.task("gpu", 4, after=[4, 5], kind=Kind.FFN)
case(
    "an unused prefetch evicted while it is under way", p,
    (0, 5), (5, 10),
    (10, 40),
    (10, 15), (15, 20),
    (40, 60),  # the router is done at 20 and a server is free, but slot 0 is being filled until 40
    (60, 64),
    causes={5: (2, SLOT), 6: (5, DATA)},
)  # fmt: skip

p = program("gpu", "h2d")
p.task("gpu", 10, kind=Kind.ROUTER)
p.task("h2d", 50, after=[0], use=(0, 1), prefetch=True, layer=1)
p.task("gpu", 20, after=[0], kind=Kind.FFN)
p.task("gpu", 5, after=[2], kind=Kind.ATTENTION, layer=1)
p.task("gpu", 5, after=[3], kind=Kind.ROUTER, layer=1)
p.task("gpu", 10, after=[4, 1], kind=Kind.FFN, layer=1)
case(
    "a late prefetch", p,
    (0, 10),
    (10, 60),
    (10, 30), (30, 35), (35, 40),
    (60, 70),  # routed at 40, waits 20 more for the prefetch
    causes={5: (1, DATA)},
)  # fmt: skip

p = program("gpu", "h2d")
p.task("h2d", 10)  # expert A into slot 0
p.task("gpu", 30, after=[0], kind=Kind.FFN)
p.task("h2d", 10, slot=[0, 1])  # expert B into slot 0
p.task("gpu", 5, after=[2], kind=Kind.FFN)
p.task("h2d", 20)  # expert C into a slot that is free from the start
p.task("gpu", 5, after=[4], kind=Kind.FFN)
case(
    "slot reuse", p,
    (0, 10),
    (10, 40),
    (40, 50),  # after the last use of A
    (50, 55),
    (50, 70),  # a free slot, yet a fifo link: behind the load of B
    (70, 75),
    causes={2: (1, SLOT), 4: (2, LANE)},
)  # fmt: skip

# --- channels -----------------------------------------------------------------------------------------------------------

p = program("a", "b", pcie=PER_PS)
p.task("a", 0, 100, on="pcie")
p.task("b", 0, 300, on="pcie")
case(
    "two flows share a channel", p,
    (0, 200),  # 100B at 1/2
    (0, 400),  # 100B by 200, the other 200B at 1: 200 + 200
)  # fmt: skip

p = program("a", "b", "c", ram=1.2 * PER_PS)
p.task("a", 0, 100, on="ram", cap=0.2 * PER_PS)
p.task("b", 0, 100, on="ram")
p.task("c", 0, 300, on="ram")
case(
    "three flows of which one is capped", p,
    (0, 500),  # 100B at its cap of 0.2 all the time
    (0, 200),  # (1.2 - 0.2) / 2 = 0.5: 100B / 0.5
    (0, 400),  # 100B by 200; then 1.2 - 0.2 = 1: 200B more
)  # fmt: skip

p = program("a", "b", "cpu", ram=PER_PS)
p.task("a", 0, 1000, on="ram")
p.task("cpu", 100, kind=Kind.FFN)
p.task("b", 0, 500, after=[1], on="ram")
case(
    "a flow starts while another is under way", p,
    (0, 1500),  # 100B by 100; 500B by 1100 at 1/2; the last 400B at 1
    (0, 100),
    (100, 1100),  # 500B at 1/2
)  # fmt: skip

p = program("a", "b", "c", ram=PER_PS)
p.task("a", 0, 100, on="ram")
p.task("b", 0, 100, on="ram")
p.task("c", 51, 100, on="ram")
case(
    "rates change in mid-flow and ends are rounded up", p,
    (0, 275),  # 25.5B by 51 at 1/2; 74.5B at 1/3 last 223.5, so 224: 51 + 224
    (0, 275),
    (0, 301),  # 224 / 3 = 74 2/3 B by 275; 25 1/3 B at 1 last 25 1/3, so 26: 275 + 26
)  # fmt: skip

p = program("a", "b", "c", ram=PER_PS, pcie=0.6 * PER_PS)
p.task("a", 0, 90, on="ram pcie")
p.task("b", 0, 310, on="ram")
p.task("c", 0, 120, on="pcie")
case(
    "a flow on two channels", p,
    (0, 300),  # pcie is the bottleneck: 0.3 each; 90B / 0.3
    (0, 400),  # ram leaves 1 - 0.3 = 0.7: 210B by 300; the last 100B at 1
    (0, 350),  # 90B by 300; the last 30B at 0.6 last 50
)  # fmt: skip

p = program("a", "b", ram=PER_PS)
p.task("a", 0, 100, on={"ram": 2.0})
p.task("b", 0, 200, on="ram")
case(
    "a copy within one memory draws twice", p,
    (0, 300),  # equal rates r with 2r + r = 1: 1/3; 100B * 3
    (0, 400),  # 100B by 300; the last 100B at 1
)  # fmt: skip

p = program("a", "b", ram=PER_PS)
p.task("a", 0, 100, on="ram")
p.task("b", 40, 100, on="ram")
case(
    "latency first, then the flow", p,
    (0, 160),  # 40B by 40, alone; 60B at 1/2
    (0, 200),  # nothing by 40; 60B by 160; the last 40B at 1
)  # fmt: skip

p = program("a", "b", ram=PER_PS)
p.task("a", 0, 100, on="ram")
p.task("a", 0, 100, after=[0], on="ram")
p.task("b", 0, 300, on="ram")
case(
    "one flow ends and the next begins at the same instant", p,
    (0, 200),  # 100B at 1/2
    (200, 400),  # 100B at 1/2
    (0, 500),  # 200B by 400; the last 100B at 1
)  # fmt: skip

p = program("gpu", "h2d", "ssd", vram=PER_PS, ram=PER_PS)
p.task("ssd", 0, 50, on="ram", cap=0.25 * PER_PS)
p.task("h2d", 0, 150, on="ram vram")
p.task("gpu", 0, 60, on="vram", cap=0.5 * PER_PS, kind=Kind.FFN)
case(
    "a roofline task, a copy and a read that meet on two memories", p,
    (0, 200),  # 50B at its cap
    (0, 230),  # vram leaves 0.5: 60B by 120; ram leaves 0.75: 120B by 200; the last 30B at 1
    (0, 120),  # 60B at 0.5, cap and fair share alike
)  # fmt: skip

p = program("h2d")
p.task("h2d", 0, 1, cap=3.0)
p.task("h2d", 0, 2, cap=3.0)
p.task("h2d", 0, 3, cap=3.0)
case(
    "durations are rounded up", p,
    (0, 333_333_333_334),  # 1 byte at 3 B/s: 1/3 s
    (333_333_333_334, 1_000_000_000_001),  # 2/3 s: 666 666 666 667
    (1_000_000_000_001, 2_000_000_000_001),  # 1 s exactly
)  # fmt: skip

# --- queues and buffers -------------------------------------------------------------------------------------------------

p = program("npu", "gpu")
p.task("npu", 10, kind=Kind.PUT)
p.task("gpu", 25, after=[0], kind=Kind.GET)
p.task("npu", 10, queue=[1], kind=Kind.PUT)
p.task("gpu", 25, after=[2], kind=Kind.GET)
p.task("npu", 10, queue=[3], kind=Kind.PUT)
p.task("gpu", 25, after=[4], kind=Kind.GET)
case(
    "a bounded queue of depth 1", p,
    (0, 10), (10, 35),
    (35, 45), (45, 70),  # the second put waits for the first get: no overlap is left
    (70, 80), (80, 105),
    causes={2: (1, QUEUE), 4: (3, QUEUE)},
)  # fmt: skip

p = program("npu", "gpu")
p.task("npu", 10, kind=Kind.PUT)
p.task("npu", 10, kind=Kind.PUT)
p.task("gpu", 25, after=[0], kind=Kind.GET)
p.task("npu", 10, queue=[2], kind=Kind.PUT)
p.task("gpu", 25, after=[1], kind=Kind.GET)
p.task("npu", 10, queue=[4], kind=Kind.PUT)
p.task("gpu", 25, after=[3], kind=Kind.GET)
p.task("gpu", 25, after=[5], kind=Kind.GET)
case(
    "a bounded queue of depth 2", p,
    (0, 10), (10, 20),
    (10, 35),
    (35, 45),  # third put: after the first get
    (35, 60),
    (60, 70),  # fourth put: after the second get
    (60, 85),  # the getter never starves
    (85, 110),
    causes={3: (2, QUEUE), 5: (4, QUEUE)},
)  # fmt: skip


def buffered(n_buffers: int) -> Program:
    """Four layers, oracle prefetch into ``n_buffers`` layer-set buffers: fills of 10, FFNs of 30, 2, 2, 2."""
    p = program("h2d", "gpu")
    fills: dict[int, int] = {}
    ffns: dict[int, int] = {}
    for layer in range(4 + n_buffers - 1):
        if layer < 4:
            reused = layer - n_buffers
            fills[layer] = p.task("h2d", 10, buffer=[ffns[reused]] if reused >= 0 else [], use=(0, layer), prefetch=True, layer=layer)
        done = layer - n_buffers + 1  # distance n_buffers - 1
        if done >= 0:
            after = [fills[done]] + ([ffns[done - 1]] if done else [])
            ffns[done] = p.task("gpu", (30, 2, 2, 2)[done], after=after, kind=Kind.FFN, layer=done)
    return p


# ids: L0 L1 F0 L2 F1 L3 F2 F3
case(
    "double buffer at distance 1", buffered(2),
    (0, 10), (10, 20),
    (10, 40),  # F0
    (40, 50),  # L2 waits for the buffer of F0
    (40, 42),  # F1
    (50, 60),  # L3: buffer free at 42, link free at 50
    (50, 52),  # F2 waits for L2
    (60, 62),  # F3 waits for L3
    causes={3: (2, BUFFER), 5: (3, LANE), 6: (3, DATA), 7: (5, DATA)},
)  # fmt: skip

# ids: L0 L1 L2 F0 L3 F1 F2 F3
case(
    "three buffers at distance 2", buffered(3),
    (0, 10), (10, 20),
    (20, 30),  # L2 has a buffer of its own
    (10, 40),  # F0
    (40, 50),  # L3 waits for the buffer of F0
    (40, 42), (42, 44),  # F1, F2 are ready in time
    (50, 52),  # F3 waits for L3: 10 less than at distance 1
    causes={4: (3, BUFFER), 5: (3, DATA), 7: (4, DATA)},
)  # fmt: skip

# --- hidden states ------------------------------------------------------------------------------------------------------

p = program("npu", "gpu", "copy", ram=PER_PS)
p.task("npu", 10, kind=Kind.ATTENTION)
p.task("copy", 5, 20, after=[0], on={"ram": 2.0}, kind=Kind.COPY)
p.task("copy", 5, 20, after=[1], on={"ram": 1.0}, kind=Kind.COPY)
p.task("gpu", 10, after=[2], kind=Kind.FFN)
case(
    "hidden states staged through two copies", p,
    (0, 10),
    (10, 55),  # 5 + 20B drawn twice: 40
    (55, 80),  # 5 + 20
    (80, 90),
)  # fmt: skip

p = program("npu", "gpu", ram=PER_PS)
p.task("npu", 10, kind=Kind.ATTENTION)
p.task("gpu", 10, after=[0], kind=Kind.FFN)
case("hidden states shared: no copy", p, (0, 10), (10, 20))

# --- steps --------------------------------------------------------------------------------------------------------------

p = program("gpu", "h2d")
p.task("gpu", 10, kind=Kind.ATTENTION)
p.task("gpu", 5, after=[0], kind=Kind.ROUTER)
p.task("gpu", 10, after=[1], kind=Kind.FFN)
p.task("gpu", 5, after=[2], kind=Kind.COMBINE)
p.task("h2d", 100, after=[1], use=(1, 0), prefetch=True)
p.end_step(gate=3)
p.task("gpu", 10, kind=Kind.ATTENTION)
p.task("gpu", 5, after=[5], kind=Kind.ROUTER)
p.task("h2d", 20, after=[6])
p.task("gpu", 10, after=[6, 4], kind=Kind.FFN)
p.task("gpu", 10, after=[6, 7], kind=Kind.FFN)
p.task("gpu", 5, after=[8, 9], kind=Kind.COMBINE)
case(
    "a prefetch under way crosses the step border", p,
    (0, 10), (10, 15), (15, 25), (25, 30),
    (15, 115),  # over the border at 30
    (30, 40), (40, 45),  # gated by the combine
    (115, 135),  # a demand load, routed at 45, behind the prefetch
    (115, 125), (135, 145), (145, 150),
    causes={5: (3, DATA), 7: (4, LANE), 8: (4, DATA)},
)  # fmt: skip

p = program("gpu", "h2d")
p.task("gpu", 5, kind=Kind.ROUTER)
p.task("gpu", 50, after=[0], kind=Kind.FFN)
p.task("h2d", 10, after=[0], use=(1, 0), prefetch=True)
p.end_step(gate=1)
p.task("gpu", 10, after=[2], kind=Kind.FFN)
case(
    "a prefetch that ended in the step before does not hold the step", p,
    (0, 5), (5, 55), (5, 15),
    (55, 65),  # its only stated dependency ended at 15, but its step begins at 55
    causes={3: (1, DATA)},  # the gate, although the prefetch has the larger id
)  # fmt: skip

p = program("gpu", "h2d", ram=PER_PS)
p.task("gpu", 100, kind=Kind.COMBINE)
p.task("h2d", 0, 300, on="ram", use=(2, 0), prefetch=True)
p.end_step(gate=0, ram=0.5 * PER_PS)
p.task("gpu", 200, kind=Kind.COMBINE)
p.end_step(ram=PER_PS)
p.task("gpu", 20, after=[1], kind=Kind.FFN)
case(
    "a channel derated at a step border, and restored at the next", p,
    (0, 100),
    (0, 400),  # 100B by 100 at 1; 100B by 300 at 1/2; the last 100B at 1
    (100, 300),
    (400, 420),
    derated=True,
)  # fmt: skip
