"""A device of its own on the CPU, `gpu`: its tensors refuse to meet those of the CPU where CUDA's would, every wait of the
host for the device is counted with its place in `etude`, and scaled_dot_product_attention with a mask, which on CUDA is the
slowest kernel, is refused. Flash attention is computed by formula.

    with PretendGPU() as gpu:
        model.to("gpu")
        …
    gpu.waits, gpu.uploads, gpu.downloads      # Counter of (kind, file:line); downloads do not make the host wait

PyTorch's name of the device is set for the whole process, so a test runs this in a process of its own: `in_a_process`.
"""

import contextlib
import itertools
import pickle
import traceback
from collections import Counter
from concurrent.futures import Future
from multiprocessing import get_context
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from etude.inference import NativeEngine
from etude.inference.step_threads import StepThreads
from etude.models import load_causal_lm

aten = torch.ops.aten
GPU = "gpu"

WAITS = {  # for which the host needs the device's values
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default),
    *(aten.bincount.default, aten.repeat_interleave.Tensor),
}
CROSSING = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}  # between devices
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Streams:
    """What PyTorch asks of a stream."""

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass


class DeviceModule(_DummyBackendModule):
    """`torch.gpu`."""

    def synchronize(self, *_):
        PretendGPU.current.waits["synchronize", place()] += 1

    def current_stream(self, *_):
        return Streams()

    def stream(self, _):
        return contextlib.nullcontext()

    def get_rng_state(self, *_):
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, *_):
        pass

    def is_bf16_supported(self):
        return True

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


class OnGPU(torch.Tensor):
    """A tensor whose values, `values`, lie on the CPU, and which says that it lies on the GPU."""

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(GPU, 0),
        )
        made.values = values
        return made

    def __repr__(self):
        return f"OnGPU({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return PretendGPU.current.compute(function, args, kwargs or {})

    def _get_data(self):
        return torch.Tensor.data.__get__(self)

    def _set_data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.values = other.values

    data = property(_get_data, _set_data)

    def __getitem__(self, index):  # PyTorch moves a list of indices to the device, past dispatch modes
        return super().__getitem__(torch.tensor(index, device=self.device) if isinstance(index, list) else index)

    def __setitem__(self, index, value):
        super().__setitem__(torch.tensor(index, device=self.device) if isinstance(index, list) else index, value)

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.values.data_ptr()

    def numpy(self, *_, **__):
        raise TypeError("can't convert gpu:0 device type tensor to numpy")


def is_ours(device):
    return device is not None and torch.device(device).type == GPU


class PretendGPU(TorchDispatchMode):
    """While it is entered, the device computes; in this thread, backward passes included."""

    current = None

    def __init__(self):
        super().__init__()
        if not hasattr(torch, GPU):
            _setup_privateuseone_for_python_backend(GPU, backend_module=DeviceModule())
        self.waits, self.uploads, self.downloads, self.calls = (Counter() for _ in range(4))
        self._stack = None

    def reset(self):
        for counter in (self.waits, self.uploads, self.downloads, self.calls):
            counter.clear()

    def __enter__(self):
        PretendGPU.current, self._stack = self, contextlib.ExitStack()
        make, convert = torch.tensor, torch.as_tensor

        def tensor(*args, device=None, **given):
            made = make(*args, **given)
            return made if device is None else made.to(device)

        def as_tensor(values, *args, device=None, dtype=None, **given):
            if not isinstance(values, torch.Tensor):
                values = convert(values, *args, dtype=dtype, **given)
            return values.to(device=device or values.device, dtype=dtype or values.dtype)

        def new_tensor(self, values, **given):
            return tensor(values, dtype=given.get("dtype", self.dtype), device=self.device)

        for name, value in {"tensor": tensor, "as_tensor": as_tensor}.items():  # these bypass dispatch modes
            self._stack.enter_context(mock.patch.object(torch, name, value))
        self._stack.enter_context(mock.patch.object(OnGPU, "new_tensor", new_tensor, create=True))
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(mock.patch.object(StepThreads, "submit", step_here))
        step = torch.no_grad()(NativeEngine._compute.__wrapped__)  # no views in inference mode
        self._stack.enter_context(mock.patch.object(NativeEngine, "_compute", step))
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # `Module.to` keeps tied parameters tied, as CUDA's does
        self._stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.compute(function, args, kwargs or {})

    def compute(self, function, args, kwargs):
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
        if composite and function not in WAITS:
            super().__enter__()
            try:
                found = function.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
            if found is not NotImplemented:
                return found
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, OnGPU)]
        device = kwargs.get("device")
        arrives, leaves = is_ours(device), device is not None and not is_ours(device)
        if not ours and not arrives:
            return function(*args, **kwargs)
        self.calls[str(function)] += 1
        self._count(function, args, ours, arrives, leaves, kwargs.get("non_blocking"))
        if ours and function not in CROSSING:
            self._refuse_strangers(function, args, tensors)
        values = tree_map_only(OnGPU, lambda x: x.values, (args, kwargs))
        if arrives:
            values[1]["device"] = torch.device("cpu")
        found = FORMULAS.get(function, function)(*values[0], **values[1])
        if leaves or function is aten._local_scalar_dense.default:
            return found
        if function._schema.is_mutable:
            mine = {id(x.values): x for x in ours}
            return tree_map_only(torch.Tensor, lambda x: mine.get(id(x), x), found)
        found = tree_map_only(torch.Tensor, OnGPU, found)
        return return_and_correct_aliasing(function, args, kwargs, found) if ours else found

    def _count(self, function, args, ours, arrives, leaves, non_blocking):
        name = str(function)
        if "scaled_dot_product" in name and ("math" in name or any(x is not None for x in args[3:4])):
            raise RuntimeError(f"the slowest attention kernel: {name}")
        if (ours and (function in WAITS or (leaves and function is aten._to_copy.default and not non_blocking))) or (
            function is aten.copy_.default and isinstance(args[1], OnGPU) and not isinstance(args[0], OnGPU)
        ):
            self.waits[name, place()] += 1
        if leaves and non_blocking:
            self.downloads[name, place()] += 1
        if function in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.waits["boolean index", place()] += 1
        if (not ours and arrives) or (function is aten.copy_.default and not isinstance(args[1], OnGPU)):
            self.uploads[name, place()] += 1

    def _refuse_strangers(self, function, args, tensors):
        """CUDA takes numbers (tensors without dimensions) and indices from the CPU."""
        indices = [x for x in args[1] if x is not None] if function in INDEXING else []
        for each in tensors:
            if isinstance(each, OnGPU) or each.dim() == 0 or any(each is index for index in indices):
                continue
            raise RuntimeError(f"Expected all tensors to be on the same device, but found gpu:0 and cpu ({function})")


def step_here(self, tokens, step, *arguments):
    """A step of the native engine in this thread, for which alone the device exists."""
    future = Future()
    try:
        future.set_result(step(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


def place():
    """file:line in etude of the current call."""
    frames = [f for f in traceback.extract_stack() if "/etude/" in f.filename]
    return f"{frames[-1].filename.rpartition('/etude/')[2]}:{frames[-1].lineno}" if frames else "outside"


# -- flash attention -----------------------------------------------------------------------------------------------


def sequences(starts_q, starts_k, causal, window):
    """For each sequence its queries, its keys, and which queries see which keys, aligned at the end."""
    left, right = (window or [-1, -1]) if not causal else (-1, 0)
    for (a, b), (c, d) in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k)):
        queries, keys = torch.arange(b - a)[:, None] + int(d - c) - int(b - a), torch.arange(d - c)[None]
        seen = (keys <= queries + right) if right >= 0 else torch.ones(b - a, d - c, dtype=torch.bool)
        yield slice(a, b), slice(c, d), seen & (keys >= queries - left) if left >= 0 else seen


def attend(query, key, value, starts_q, starts_k, causal, scale, window):
    """(tokens, heads, head_dim) in float32, and the normalisers (heads, tokens)."""
    assert query.dtype in (torch.bfloat16, torch.float16)
    query, key, value = (x.float() for x in (query, key, value))
    outputs, normalisers, group = [], [], query.shape[1] // key.shape[1]
    for rows, columns, seen in sequences(starts_q.tolist(), starts_k.tolist(), causal, window):
        keys, values = (x[columns].repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        normalisers.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(normalisers, 1)


def flash_forward(query, key, value, starts_q, starts_k, max_q, max_k, causal, scale, window, *_):
    assert max_q == int(starts_q.diff().max())
    assert max_k == int(starts_k.diff().max())
    assert int(starts_q[-1]) == len(query)
    assert int(starts_k[-1]) == len(key)
    out, normaliser = attend(query, key, value, starts_q, starts_k, causal, scale, window)
    return out.to(query.dtype), normaliser, torch.zeros(2, dtype=torch.uint64)


def flash_backward(grad, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, causal, rng, scale, window):
    """Dao et al. 2022, arXiv 2205.14135, algorithm 4."""
    kind, group = query.dtype, query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    query, key, value, out, grad = (x.float() for x in (query, key, value, out, grad))
    for rows, columns, seen in sequences(starts_q.tolist(), starts_k.tolist(), causal, window):
        keys, values = (x[columns].repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * scale - lse[:, rows, None]
        shares = scores.exp().masked_fill(~seen, 0.0)
        bent = torch.einsum("qhd,khd->hqk", grad[rows], values) - (grad[rows] * out[rows]).sum(-1).t()[..., None]
        slopes = shares * bent * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", slopes, keys)
        for place, all_heads in (
            (1, torch.einsum("hqk,qhd->khd", slopes, query[rows])),
            (2, torch.einsum("hqk,qhd->khd", shares, grad[rows])),
        ):
            grads[place][columns] = all_heads.unflatten(1, (-1, group)).sum(2)
    return tuple(x.to(kind) for x in grads)


FORMULAS = {}


def load_formulas():
    import torch.nn.attention.varlen

    FORMULAS[torch.ops.torch_attn._varlen_attn.default] = flash_forward
    FORMULAS[torch.ops.torch_attn._varlen_attn_backward.default] = flash_backward


# -- processes -----------------------------------------------------------------------------------------------------


def in_a_process(work, path, *given):
    """What `work(gpu, path, *given)` returns in a new process with the device; `path` is a model's, loaded once before the
    device exists: otherwise Transformers leaves the buffers of the first model that it loads uninitialised."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "etude.workers"])
    answers = context.Queue()
    process = context.Process(target=_answer, args=(answers, work, path, given), daemon=True)
    process.start()
    try:
        found, failure = answers.get(timeout=300)
        assert failure is None, failure
        return pickle.loads(found)
    finally:
        process.kill()


def _answer(answers, work, path, given):
    torch.set_num_threads(1)
    try:
        load_causal_lm(path)
        load_formulas()
        with PretendGPU() as gpu:
            found = work(gpu, path, *given)
        answers.put((pickle.dumps(found), None))
    except BaseException:
        answers.put((None, traceback.format_exc()))
