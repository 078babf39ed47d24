"""What the decode steps of a layer read, counted on the plan's own selections."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.policies.base import Selection


@dataclass
class LayerReads:
    """Sums over the steps of one layer, all kv heads.

    scan_bytes, estimation_bytes   index read to decide, and to estimate
    resident_tokens, -_pages       exact tokens that lie in no block
    blocks, pages, tokens          what is retrieved in blocks
    """

    steps: int = 0
    scan_bytes: int = 0
    estimation_bytes: int = 0
    resident_tokens: int = 0
    resident_pages: int = 0
    blocks: int = 0
    pages: int = 0
    tokens: int = 0

    def add(self, selection: Selection, layer: LayerInfo) -> None:
        """Count the steps of one selection."""
        resident = selection.exact_tokens()
        if selection.blocks is not None and selection.block_tokens is not None:
            resident = resident - selection.block_tokens.sum(-1)
            self.blocks += int((selection.blocks >= 0).sum())
            self.tokens += int(selection.block_tokens.sum())
        if selection.block_pages is not None:
            self.pages += int(selection.block_pages.sum())
        exact = selection.pages() * layer.page_bytes
        self.steps += len(selection.positions)
        self.scan_bytes += int(selection.scan_bytes.sum())
        self.estimation_bytes += int((selection.read_bytes(layer) - exact - selection.scan_bytes).sum())
        self.resident_tokens += int(resident.sum())
        self.resident_pages += int(((resident + PAGE_TOKENS - 1) // PAGE_TOKENS).sum())
