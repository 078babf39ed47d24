"""A make-believe CUDA device on the CPU: mixing devices is refused as a GPU would, results are the CPU's.

Tensors "on the GPU" are wrappers that say ``cuda:0`` and hold a CPU tensor. Operators that mix them with
CPU tensors of one or more dimensions raise, as do ``numpy()`` and factory calls that forget the device and
meet such a tensor later. Kernels that need a real device (Triton) are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
_MOVES = ("aten._to_copy", "aten.copy_")
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index")


class OnGpu(Tensor):
    """A tensor that says it is on the GPU."""

    inner: Tensor
    is_cuda = True
    device = GPU  # what Python sees; torch itself sees "cpu", the device that every build can serve
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        kept = self if dtype is None or dtype == self.dtype else super().to(dtype)
        return kept.inner.clone() if device is not None and device.type == "cpu" else kept

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.inner.clone()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.inner!r})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def pretend_gpu() -> Iterator[torch.device]:
    """Inside, ``cuda:0`` is a device that tensors can be made on and moved to; nothing else is on the GPU."""
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with ExitStack() as stack:
            for name in ("torch.cuda._lazy_init", "torch.cuda.synchronize"):
                stack.enter_context(mock.patch(name))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Mode())
            yield GPU
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, given = str(func), dict(kwargs)
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    on_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
    wanted = given.get("device")
    if wanted is not None:
        on_gpu = torch.device(wanted).type == "cuda"
        given["device"] = torch.device("cpu")
    if name.startswith("aten.copy_"):
        on_gpu = isinstance(args[0], OnGpu)
    elif not name.startswith(_MOVES):
        _check(name, args, tensors)
    given.pop("pin_memory", None)
    found = func(*tree_map(_inside, args), **tree_map(_inside, given))
    written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    if written and func._schema.returns and func._schema.returns[0].alias_info is not None:
        place = written[0]
        return args[place] if place < len(args) else kwargs[func._schema.arguments[place].name]
    return (
        tree_map(lambda leaf: OnGpu(leaf) if isinstance(leaf, Tensor) else leaf, found) if on_gpu else found
    )


def _check(name: str, args: Any, tensors: list[Tensor]) -> None:
    """Every tensor on one device; numbers and indices on the CPU may join the GPU's."""
    apart = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim()]
    if not apart or len(apart) == len(tensors):
        return
    if name.startswith(_INDEXING) and isinstance(args[0], OnGpu):
        indices = [index for index in args[1] if index is not None]
        if all(any(tensor is index for index in indices) for tensor in apart):
            return
    kinds = ", ".join(f"{'cuda' if isinstance(t, OnGpu) else 'cpu'}{list(t.shape)}" for t in tensors)
    raise RuntimeError(f"Expected all tensors to be on the same device: {name} got {kinds}")


def _inside(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, OnGpu) else leaf
