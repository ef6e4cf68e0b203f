"""Owns what each kind of task asks of the machine: model facts under a precision plan, as ``Work`` rows. No machine figures.

Kernel counts are of unfused transformer code, one launch per matrix product plus the norms and pointwise steps between them;
they are assumptions that a runtime description replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesim.layout import Layout
from moesim.model import visible_pairs
from moesim.precision import Format
from moesim.schedule import Work

ATTENTION_KERNELS = 8  # norm, q, k, v (or one fused), rope, cache write, scores and values, output projection, residual
ROUTER_KERNELS = 3  # norm, product, top-k
EXPERT_KERNELS = 3  # gate, up (with the activation fused), down
ADAPTER_KERNELS = 2  # down to the rank and up again, of one matrix
COMBINE_KERNELS = 1
HEAD_KERNELS = 3  # norm, product, sampling
HIDDEN_BYTES = 2  # hidden states travel in 16 bit


class Works:
    """Builds works for one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.model, self.plan = layout.model, layout.plan
        self._granular, self._compressed = layout.scenario.granularity, layout.scenario.memory.mla_compressed
        self._memo: dict[tuple[str | int, ...], list[Work]] = {}  # what recurs in every step is built once
        self._projections: dict[tuple[int, int], tuple[float, int, int, int, Format]] = {}  # by layer and tokens
        self._scores: dict[tuple[int, bool], tuple[float, int | None, float]] = {}  # by layer, and whether each sequence has one new token

    def _hidden(self, tokens: int) -> int:
        return tokens * self.model.hidden_size * HIDDEN_BYTES

    def attention(self, layer: int, sequences: int, new_tokens: int, context: int) -> Work:
        """Attention of ``new_tokens`` of each sequence; ``context`` counts them too."""
        return self.attention_of(layer, [(sequences, new_tokens, context)])

    def attention_of(self, layer: int, parts: Sequence[tuple[int, int, int]]) -> Work:
        """Attention of (sequences, new tokens of each, context that counts them too), all in one pass over the weights."""
        tokens = 0
        for sequences, new, _ in parts:
            tokens += sequences * new
        flops, weight_bytes, kept_bytes, state_bytes, form = self._attention(layer, tokens)
        cache_bytes = 2 * self._hidden(tokens)
        for sequences, new, context in parts:
            pair, window, token = self._score(layer, new == 1)
            kept = context if window is None or window > context else window
            cache_bytes += sequences * ((kept + new) * kept_bytes + 2 * state_bytes)
            flops += sequences * (pair * visible_pairs(new, context, window) + token * new)
        return Work(
            self.layout.attention_device[layer], flops, form.compute, weight_bytes, cache_bytes, ATTENTION_KERNELS, tokens, part="attention",
            weights=form.name,
        )  # fmt: skip

    def _score(self, layer: int, one: bool) -> tuple[float, int | None, float]:
        """``ModelSpec.score_flops`` of a layer where each sequence has one new token, or more."""
        found = self._scores.get((layer, one))
        if found is None:
            found = self._scores[layer, one] = self.model.score_flops(layer, self._compressed and one)
        return found

    def _attention(self, layer: int, tokens: int) -> tuple[float, int, int, int, Format]:
        """What attention needs at any context: FLOP of its matrices, their bytes, those kept per token and of state, the format."""
        found = self._projections.get((layer, tokens))
        if found is None:
            model, plan = self.model, self.plan
            found = self._projections[layer, tokens] = (
                model.linear_flops(layer, "attention", tokens),
                model.part_bytes(plan, "attention", layer) + model.part_bytes(plan, "norms", layer),
                model.kv_bytes_per_token(plan, layer, self._compressed),
                model.state_bytes(plan, layer),
                plan.format("attention", layer),
            )
        return found

    def _part(self, device: str, part: str, layer: int, tokens: int, kernels: int) -> Work:
        form = self.plan.format(part, layer)
        return Work(
            device, flops=self.model.linear_flops(layer, part, tokens), compute=form.compute,
            weight_bytes=self.model.part_bytes(self.plan, part, layer), state_bytes=2 * self._hidden(tokens), kernels=kernels, tokens=tokens,
            part="router" if part == "router" else "ffn", weights=form.name,
        )  # fmt: skip

    def router(self, layer: int, tokens: int) -> Work:
        return self._part(self.layout.attention_device[layer], "router", layer, tokens, ROUTER_KERNELS)

    def dense_ffn(self, layer: int, tokens: int) -> Work:
        return self._part(self.layout.attention_device[layer], "dense_ffn", layer, tokens, EXPERT_KERNELS)

    def shared_expert(self, layer: int, tokens: int) -> Work | None:
        """The shared expert of a layer, or None where it has none."""
        if not self.model.layer_params(layer, "shared_expert"):
            return None
        return self._part(self.layout.shared_device[layer], "shared_expert", layer, tokens, EXPERT_KERNELS)

    def combine(self, layer: int, tokens: int) -> Work:
        """Weighted sum of the experts' outputs and the residual."""
        size = self._hidden(tokens) * (self.model.top_k + 1)
        return Work(
            self.layout.attention_device[layer],
            flops=float(2 * self.model.top_k * tokens * self.model.hidden_size),
            state_bytes=size,
            kernels=COMBINE_KERNELS,
            tokens=tokens,
            part="combine",
        )

    def head(self, emits: int) -> Work:
        """Logits and sampling of the sequences that get a token; without any, nothing but the end of the step."""
        device = self.layout.head_device
        if emits == 0:
            return Work(device)
        model, plan = self.model, self.plan
        logits = emits * model.vocab_size * 4
        return Work(
            device, flops=model.linear_flops(-1, "head", emits), compute=plan.format("head").compute, weight_bytes=model.head_bytes(plan),
            state_bytes=2 * logits + self._hidden(emits), kernels=HEAD_KERNELS, tokens=emits, part="head", weights=plan.format("head").name,
        )  # fmt: skip

    def expert_pieces(self, device: str, layer: int, tokens: int) -> list[Work]:
        """One expert on some tokens: one work, or one a matrix."""
        found = self._memo.get((device, layer, tokens))
        if found is None:
            found = self._memo[device, layer, tokens] = self._expert_pieces(device, layer, tokens)
        return found

    def _expert_pieces(self, device: str, layer: int, tokens: int) -> list[Work]:
        form = self.plan.format("routed_experts", layer)
        flops, state = self.model.expert_flops(layer, tokens), 2 * self._hidden(tokens)
        adapters, kernels = self._adapters(layer)
        flops += tokens * adapters
        if self._granular != "matrix":
            size = self.layout.expert_bytes[layer]
            return [
                Work(
                    device, flops, form.compute, size, state, EXPERT_KERNELS + kernels, tokens, part="ffn", weights=form.name,
                    adapter_bytes=adapters,
                )
            ]  # fmt: skip
        sizes = self.layout.matrix_bytes[layer].values()
        total = sum(sizes)
        return [
            Work(
                device, flops * size / total, form.compute, size, state * size // total, 1 + kernels // EXPERT_KERNELS, tokens, part="matrix",
                weights=form.name, adapter_bytes=adapters * size // total,
            )
            for size in sizes
        ]  # fmt: skip

    def _adapters(self, layer: int) -> tuple[int, int]:
        """Bytes of one expert's adapters (16 bit, so also their FLOP per token) and kernels of all; 0 without.

        Every expert of the layer is charged them, an upper bound where only the most routed ones have any: those run most.
        """
        size = 2 * self.model.adapter_params(self.plan, layer)
        return size, ADAPTER_KERNELS * EXPERT_KERNELS if size else 0

    def experts(self, device: str, layer: int, tokens: Sequence[int]) -> Work:
        """A whole layer-set in one work; ``tokens`` of each expert."""
        rows = sum(tokens)
        form = self.plan.format("routed_experts", layer)
        adapters, kernels = self._adapters(layer)
        return Work(
            device, flops=self.model.expert_flops(layer, rows) + rows * adapters, compute=form.compute,
            weight_bytes=len(tokens) * self.layout.expert_bytes[layer], state_bytes=2 * self._hidden(rows), kernels=EXPERT_KERNELS + kernels,
            tokens=rows, part="layer-set", weights=form.name, adapter_bytes=len(tokens) * adapters,
        )  # fmt: skip

    def hop(self, lane: str, layer: int, experts: int, fast: bool) -> list[Work]:
        """Move experts of one layer over a link or from storage: one work, or one a matrix."""
        found = self._memo.get((lane, layer, experts, fast))
        if found is None:
            found = self._memo[lane, layer, experts, fast] = self._hop(lane, layer, experts, fast)
        return found

    def _hop(self, lane: str, layer: int, experts: int, fast: bool) -> list[Work]:
        io = self.layout.scenario.io
        sizes = list(self.layout.matrix_bytes[layer].values())
        pieces = [[size] for size in sizes] if self._granular == "matrix" else [sizes]
        out = []
        for group in pieces:
            size = sum(group) * experts
            if lane in self.layout.hardware.links:
                out.append(Work(lane, transfer_bytes=size, operations=experts, mode="pinned" if io.pinned else "pageable"))
                continue
            extents = experts if io.layout == "merged" else sum(-(-s // io.scattered_piece) for s in group) * experts
            out.append(
                Work(
                    lane,
                    transfer_bytes=size,
                    operations=extents,
                    request_bytes=io.request,
                    depth=io.depth,
                    mode=io.engine + ("+fast" if fast else ""),
                )
            )
        return out

    def copy(self, resource: str, tokens: int) -> Work:
        """Hidden states over a link, or written and read again by a device in its own memory."""
        if resource in self.layout.hardware.links:
            return Work(resource, transfer_bytes=self._hidden(tokens), operations=1, mode="pinned")
        return Work(resource, state_bytes=2 * self._hidden(tokens), kernels=1, tokens=tokens, part="copy")

    def handoff(self, device: str) -> Work:
        """One end of a queue."""
        return Work(device, overhead_s=self.layout.scenario.pipeline.handoff_s)

    def lookup(self, tokens: int) -> Work:
        """Rows of lookup tables that lie on storage (claim T5): one small read a token."""
        size = self.model.lookup_bytes_per_token(self.plan) * tokens
        io = self.layout.scenario.io
        return Work(self.layout.disk, transfer_bytes=size, operations=tokens, request_bytes=io.request, depth=io.depth, mode=io.engine)
