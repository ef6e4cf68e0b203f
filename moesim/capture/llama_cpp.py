"""Owns llama.cpp in this process: a model from a GGUF file, run token by token, with what its graph computed shown on demand.

The library comes from the ``xllamacpp`` package (prebuilt for CPUs), and is called through its C interface, whose records change from
version to version: those below are of ``VERSION``, after ``include/llama.h`` and ``ggml/include/ggml.h`` of its sources. Another version is refused.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError

VERSION = "2026.10.11549"
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # enum ggml_type
MMAP, NO_MMAP = 1, 0  # enum llama_load_mode
FLASH = {None: -1, False: 0, True: 1}  # enum llama_flash_attn_type
I32 = 26  # enum ggml_type

LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
EvalCallback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class _ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32), ("split_mode", c_int), ("load_mode", c_int),
        ("lazy_mode", c_int), ("main_gpu", c_int32), ("tensor_split", c_void_p), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p), ("vocab_only", c_bool), ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool), ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    ]  # fmt: skip


class _ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32), ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("ctx_type", c_int), ("rope_scaling_type", c_int), ("pooling_type", c_int), ("attention_type", c_int), ("flash_attn_type", c_int),
        ("rope_freq_base", c_float), ("rope_freq_scale", c_float), ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float),
        ("cb_eval", EvalCallback), ("cb_eval_user_data", c_void_p), ("type_k", c_int), ("type_v", c_int), ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("embeddings", c_bool), ("offload_kqv", c_bool), ("no_perf", c_bool),
        ("op_offload", c_bool), ("swa_full", c_bool), ("kv_unified", c_bool), ("samplers", c_void_p), ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    ]  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("op", c_int), ("op_params", c_int32 * 16),
        ("flags", c_int32), ("src", c_void_p * 10), ("view_src", c_void_p), ("view_offs", c_size_t), ("data", c_void_p), ("name", c_char * 64),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_free": (None, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
}


def library() -> Any:
    """Return the C interface.

    Raises
    ------
    InputError
        If the package is absent, or of a version whose records are not known.
    """
    fix = f"pip install xllamacpp=={VERSION}"
    try:
        found = importlib.metadata.version("xllamacpp")
        package = importlib.import_module("xllamacpp.xllamacpp")
    except ImportError as error:
        raise InputError("xllamacpp", expected="an installed package, to run GGUF files", got=str(error)[:120], fix=fix) from None
    if found != VERSION:
        raise InputError("xllamacpp", expected=f"version {VERSION}, whose C records are known here", got=found, fix=fix)
    lib = ctypes.CDLL(str(package.__file__))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    defaults = lib.llama_context_default_params()
    seen = (defaults.n_ctx, defaults.n_batch, defaults.n_ubatch, defaults.type_k, defaults.type_v, bool(defaults.op_offload))
    if seen != (512, 2048, 512, KV_TYPES["f16"], KV_TYPES["f16"], True):
        raise InputError("xllamacpp", expected="the defaults of llama.h", got=str(seen), fix=fix)
    return lib


@dataclass
class LlamaCpp:
    """A model and a context. Use as a context manager.

    Parameters
    ----------
    path : Path
        A GGUF file.
    context : int
        Tokens that the KV cache holds.
    threads : int
    micro_batch : int
        Most tokens computed at once.
    kv : str
        ``f32``, ``f16`` or ``q8_0``.
    flash : bool, optional
        Flash attention; None: as the engine chooses.
    mmap : bool
        Whether weights are mapped, or read into memory of its own.
    repack : bool
        Whether weights may be copied into the layout of the CPU's kernels.
    watch : callable, optional
        ``watch(name)`` says whether a tensor of the graph is wanted; ``see(name, values)`` gets it. Both or neither.
    """

    path: Path
    context: int = 512
    threads: int = 1
    micro_batch: int = 512
    kv: str = "f16"
    flash: bool | None = None
    mmap: bool = True
    repack: bool = True
    watch: Callable[[str], bool] | None = None
    see: Callable[[str, NDArray[np.int32]], None] | None = None
    log: list[str] = field(default_factory=list)

    def __enter__(self) -> LlamaCpp:
        self._lib = lib = library()
        self._on_log = LogCallback(lambda _level, text, _user: self.log.append(text.decode("utf-8", "replace")))
        lib.llama_log_set(self._on_log, None)
        lib.llama_backend_init()
        how = lib.llama_model_default_params()
        how.load_mode, how.use_extra_bufts = MMAP if self.mmap else NO_MMAP, self.repack
        self._model = lib.llama_model_load_from_file(str(self.path).encode(), how)
        if not self._model:
            raise InputError(
                str(self.path), expected="a GGUF file that llama.cpp loads", got=self._complaint(), fix="see the message of the engine"
            )
        run = lib.llama_context_default_params()
        run.n_ctx, run.n_batch, run.n_ubatch = self.context, max(self.micro_batch, 1), self.micro_batch
        run.n_threads = run.n_threads_batch = self.threads
        run.type_k = run.type_v = KV_TYPES[self.kv]
        run.flash_attn_type = FLASH[self.flash]
        if self.watch:
            self._on_eval = EvalCallback(self._evaluated)
            run.cb_eval = self._on_eval
        self._run = lib.llama_init_from_model(self._model, run)
        if not self._run:
            lib.llama_model_free(self._model)
            raise InputError(
                str(self.path), expected="a context that the engine can make", got=self._complaint(), fix="ask for a smaller context"
            )
        self._batch = lib.llama_batch_init(self.micro_batch, 0, 1)
        self.position = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._run)
        self._lib.llama_model_free(self._model)
        self._lib.llama_log_set(LogCallback(), None)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with the model's first token."""
        raw = text.encode()
        room = (c_int32 * (len(raw) + 8))()
        n = self._lib.llama_tokenize(self._lib.llama_model_get_vocab(self._model), raw, len(raw), room, len(room), True, False)
        if n < 0:
            raise InputError(
                "prompt", expected="a text that the model's vocabulary can express", got=text[:40], fix="give token_ids instead"
            )
        return list(room[:n])

    def decode(self, tokens: Sequence[int], *, all_outputs: bool = False) -> NDArray[np.float32]:
        """Run tokens after those that were run before; return the logits (V,) of the last one.

        Raises
        ------
        InputError
            If the context is full, or the engine fails.
        """
        for start in range(0, len(tokens), self.micro_batch):
            piece = tokens[start : start + self.micro_batch]
            batch = self._batch
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.position + i, 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = all_outputs or start + i == len(tokens) - 1
            status = self._lib.llama_decode(self._run, batch)
            if status:
                raise InputError("llama_decode", expected="status 0", got=f"{status}: {self._complaint()}", fix="ask for a larger context")
            self.position += len(piece)
        self._lib.llama_synchronize(self._run)
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._run, -1), (self.vocabulary,))

    def rewind(self, position: int) -> None:
        """Forget what was run from a position on."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._run), 0, position, -1)
        self.position = position

    def _evaluated(self, address: int, ask: bool, _user: object) -> bool:
        assert self.watch and self.see
        tensor = ctypes.cast(address, POINTER(_Tensor)).contents
        name = tensor.name.decode("utf-8", "replace")
        if ask:
            return self.watch(name)
        if tensor.type == I32 and self.watch(name):
            k, n = tensor.ne[0], tensor.ne[1]
            span = (n - 1) * tensor.nb[1] + (k - 1) * tensor.nb[0] + 4
            raw = np.frombuffer((c_char * span).from_address(tensor.data), np.int8)
            view = np.lib.stride_tricks.as_strided(raw[: 4 * (span // 4)].view(np.int32), (n, k), (tensor.nb[1], tensor.nb[0]))
            self.see(name, view.copy())
        return True

    def _complaint(self) -> str:
        return next((line.strip()[:160] for line in reversed(self.log) if line.strip()), "no reason given")
