"""Two ways on from one state: an index is copied in structure, and shares its tensors."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kvtune.geometry import LayerInfo
from kvtune.policies.ctkvr_dynamic import Stretch
from kvtune.policies.keys import KeyStore


def fork_index(index: Any) -> Any:
    """A copy of a policy's index: what is appended to or selected from one, the other does not notice.

    Policies replace the tensors of their indexes as these grow, so that both may hold the same ones. Written
    in place are only the room behind a :class:`KeyStore`'s keys, which the copy does not get, and the probes
    that CTkvr notes per stretch, which are copied. What is immutable (layers, Faiss indexes of a finished
    part, tensors) is shared.
    """
    match index:
        case KeyStore():
            store = KeyStore(index.keys, index.values, index.layer)
            store.prompt_length = index.prompt_length
            return store
        case Stretch():
            stretch = copy.copy(index)
            stretch.queries, stretch.probed = _cloned(index.queries), _cloned(index.probed)
            return stretch
        case list():
            return [fork_index(item) for item in index]
    if not is_dataclass(index) or isinstance(index, LayerInfo):
        return index
    forked: Any = copy.copy(index)
    for entry in fields(index):
        setattr(forked, entry.name, fork_index(getattr(index, entry.name)))
    return forked


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
