"""What engines share: inside a ``with`` block the model's attention goes through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import Tensor

from kvtune.devices import seconds_at_rest
from kvtune.models import LoadedModel, attention_through


class Attached(ABC):
    """Sends the attention of ``loaded`` through :meth:`attention` while the ``with`` block lasts."""

    loaded: LoadedModel
    _through: AbstractContextManager[None] | None = None

    @abstractmethod
    def attention(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        """The attention function, as transformers calls it."""

    @abstractmethod
    def start(self) -> None:
        """Forget the sequence."""

    def __enter__(self) -> Self:
        self._through = attention_through(self.loaded.model, self.attention)
        self._through.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._through is not None
        self._through.__exit__(None, None, None)
        self._through = None
        self.start()

    def _now(self) -> float:
        """Seconds, with the device at rest."""
        return seconds_at_rest(self.loaded.device)
