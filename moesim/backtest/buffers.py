"""Owns what an engine allocates beside weights and the K/V cache: compute buffers, copies of weights in another layout.

Compute buffers of the llama.cpp family, in bytes, per device (the largest of what is live at once decides; DESIGN.md section 5):

    with the head:         micro-batch x (vocabulary + 2 hidden) x 4
    without it:            micro-batch x (mask x context + 4 x rows x hidden); the mask of llama.cpp is kept in 32 bit (4 bytes) and, for
                           flash attention, copied to 16 bit beside two of its tiles (8), that of ik_llama.cpp in 16 bit only (2); rows
                           are the outputs of a token's experts, once with the residual stream and its norm, or twice
    copying experts:       one matrix of all experts of a layer on top of the second
    scores written out:    heads x context x micro-batch x 4 on top
    latent heads expanded: 2 x heads x (key + value width) x context x 2 on top of the first

On a CPU alone, where an operator works in place less often (read off llama.cpp's own report, ``benchmarks/thirdparty``):

    with the head:         micro-batch x (4 vocabulary + 20 hidden + mask x context), the mask in 16 bit, or in 32 bit without flash attention
    scores written out:    micro-batch x 4 x ((heads + 1) x context + 6 hidden + keys + values of a token)
"""

from __future__ import annotations

from collections.abc import Iterator

from moesim.architecture import FullAttention, MlaAttention
from moesim.layout import Layout
from moesim.runtimes import RunFacts, Runtime


def compute_buffers(
    layout: Layout, runtime: Runtime, run: RunFacts, tokens: int, context: int, *, gpus: int = 1, copies: bool = False
) -> Iterator[int]:
    """Yield the bytes of each GPU's compute buffer; the last one holds the head.

    Parameters
    ----------
    layout : Layout
        Of the model and its precision.
    runtime : Runtime
    run : RunFacts
    tokens, context : int
        Micro-batch, and tokens of the cache.
    gpus : int
    copies : bool
        Whether a prompt's experts in main memory are copied to the GPU.
    """
    model = layout.model
    a = model.attention
    head = tokens * (model.vocab_size + 2 * model.hidden_size) * 4
    unfused = runtime.choose("gpu_attention", run) == "unfused"
    if runtime.name == "ik_llama.cpp":
        mask, hidden = 2, 2 * model.top_k
    else:
        mask, hidden = 4 if unfused else 8, model.top_k + 2
    body = tokens * (mask * context + 4 * hidden * model.hidden_size)
    if copies:
        body += max(model.expert_matrix_bytes(layout.plan, model.moe_layers[-1]).values()) * model.n_experts
    if unfused and isinstance(a, (FullAttention, MlaAttention)):
        body += a.n_heads * context * tokens * 4
    if isinstance(a, MlaAttention) and runtime.choose("latent_prompt", run) == "expanded":
        head += 2 * a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim) * context * 2
    yield from [body] * (gpus - 1)
    yield max(head, body if gpus == 1 else 0)


def host_compute_buffer(layout: Layout, run: RunFacts, tokens: int, context: int) -> int:
    """Return the bytes of the compute buffer of a run on the CPU alone; see the module for the formula.

    Parameters
    ----------
    layout : Layout
        Of the model and its precision.
    run : RunFacts
    tokens, context : int
        Micro-batch, and tokens of the cache.
    """
    model, a = layout.model, layout.model.attention
    head = tokens * (4 * model.vocab_size + 20 * model.hidden_size + (2 if run.flash else 4) * context)
    if run.flash or not isinstance(a, FullAttention):
        return head
    cached = a.n_kv_heads * (a.head_dim + a.v_dim)
    return max(head, tokens * 4 * ((a.n_heads + 1) * context + 6 * model.hidden_size + cached))


def repacked_bytes(layout: Layout) -> int:
    """Return the bytes of the weights' copy in the layout of the CPU's kernels: all matrices of the layers but the routers.

    The head is copied too, but its pages at the end of the file need not stay mapped then.
    """
    return sum(layout.model.part_bytes(layout.plan, part) for part in ("attention", "routed_experts", "shared_expert", "dense_ffn"))
