"""What `spartan.prune` tells of its work."""

from dataclasses import dataclass

from spartan.wording import aligned


@dataclass(frozen=True)
class PrunedLayer:
    """One weight: its size, how many of its entries are kept, and the block that it was pruned with ("" for none)."""

    name: str
    weights: int
    kept: int
    block: str = ""


@dataclass(frozen=True)
class PruneReport:
    """What was pruned, and how.

    Args:
        criterion: by what.
        layers: the weights, in the order in which they were pruned.
        blocks: the blocks that were pruned one after the other, in the order in which they run.
        why_whole: where there are no blocks, why the model was run as a whole; "" without calibration.
        batches: batches of calibration data.
        seconds: how long it took.
        device: where the peak was measured: a CUDA device, or "process" for main memory.
        peak_bytes: the most memory in use there; None where the system does not tell.
    """

    criterion: str
    layers: tuple[PrunedLayer, ...]
    blocks: tuple[str, ...]
    why_whole: str
    batches: int
    seconds: float
    device: str
    peak_bytes: int | None

    @property
    def density(self) -> float:
        """The fraction of all these weights that is kept."""
        return sum(layer.kept for layer in self.layers) / sum(layer.weights for layer in self.layers)

    def __str__(self) -> str:
        how = f"{len(self.blocks)} blocks, one after the other" if self.blocks else "the model as a whole"
        how += f" ({self.why_whole})" if self.why_whole else ""
        peak = "" if self.peak_bytes is None else f", at most {self.peak_bytes / 2**20:,.0f} MiB ({self.device})"
        head = f"{self.criterion}: {self.density:.4%} of {sum(x.weights for x in self.layers):,} weights kept"
        data = f"; {how}, {self.batches} batches" if self.batches else ""
        rows = [["layer", "block", "weights", "kept", "density"]]
        rows += [[x.name, x.block, f"{x.weights:,}", f"{x.kept:,}", f"{x.kept / x.weights:.2%}"] for x in self.layers]
        return "\n".join([f"{head}{data}; {self.seconds:.1f} s{peak}", *aligned(rows, left=2)])
