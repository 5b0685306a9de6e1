"""The weights of one rank: their source, the weights in use, and the staged weights that will replace them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_kernels.cpu.packing import PANEL_FORMATS
from megatron_runtime.backends.native.memory import require_memory as require_host_memory
from megatron_runtime.checkpoints.checkpoint import (
    Kinds,
    Signature,
    UnusableWeightsError,
    VerifiedCheckpoint,
    is_finite,
    open_checkpoint,
    require_same_model,
    with_progress,
)
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelInMemory, ModelSource, PublishedModel, resolve
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.models.layers.cpu import PackedLinears
from megatron_runtime.models.layers.linear import LinearFactory
from megatron_runtime.models.tensors import Checkpoint, num_parameters
from megatron_runtime.models.weights import load_weights
from megatron_runtime.protocol.published_weights import (
    PublishedSource,
    WeightsUnavailableError,
    is_published,
    names_same_weights,
)

if TYPE_CHECKING:
    from megatron_runtime.distributed.weight_port import WeightPort

logger = logging.getLogger(__name__)


class WeightStore:
    """The weights of one rank. They are verified while they are read, and unverified weights are never used.

    stage() may run during a step, on another thread. All other methods must run on the thread that runs the steps.

    source:  the model that load() reads.
    linears: returns a new factory for the matrices; None keeps the matrices dense, with type `dtype`.
    require_memory: called as require_memory(bytes, what=...) before weights are read; raises MemoryShortError.
    staging: function that gets the weights in use, and returns a factory for staged matrices in host memory. swap()
             copies the staged matrices over the weights in use. If None, `linears` also creates the staged matrices.
    shard:   the part of the model that this rank holds; None means the whole model.
    keys_dir: directory of engine.key, engine.pub and trainer.pub, for connections to a trainer; None means no
              encryption.
    open_port: opens the port on which this rank offers a trainer's weights to other engines. It is called when the rank
               first has weights of a trainer. None means that the rank offers no weights.
    reading: returns a context manager. The threads of the port copy weights from the device only within this context.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        linears: Callable[[], LinearFactory] | None = None,
        *,
        require_memory: Callable[..., None] = require_host_memory,
        shard: Shard | None = None,
        staging: Callable[[DecoderWeights], LinearFactory] | None = None,
        keys_dir: Path | None = None,
        open_port: Callable[[], WeightPort] | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        checkpoint = open_checkpoint(source)
        self.config = checkpoint.config
        self.source = source
        self.in_memory = source if isinstance(source, ModelInMemory) else None
        """The model to which the reference IN_MEMORY refers.

        The program can set another model of the same architecture.
        """
        self.weights: DecoderWeights | None = None
        self._dtype = dtype
        self._linears = linears or LinearFactory
        self._require_memory = require_memory
        self._shard = shard or Shard()
        self._staging = staging
        self.keys_dir = keys_dir
        self._open_port = open_port
        self._reading = reading
        self._port: WeightPort | None = None
        self._kinds: Kinds | None = checkpoint.kinds
        """Shapes and types that the tensors of files must have; None accepts any.

        The types of a trainer's tensors do not matter, because the matrices have the engine's type.
        """
        self._signature: Signature | None = None
        self._staged: tuple[ModelSource, DecoderWeights, Signature] | None = None
        self._kept: DecoderWeights | None = None
        """Released weights that are kept because they may be the last copy."""

    @property
    def num_bytes(self) -> int:
        """Approximate size of this rank's weights in bytes."""
        sizes = self._shard.sizes
        values = num_parameters(self.config, expert_ranks=sizes.expert)
        return int(values * self._linears().value_bytes(self._dtype)) // (sizes.tensor * sizes.pipeline)

    @property
    def digest(self) -> str | None:
        """Digest of the weights that were loaded last; None before the first load."""
        return self._signature.digest if self._signature is not None else None

    @property
    def copies(self) -> tuple[str, ...]:
        """Address at which other engines can get this rank's weights; empty if the rank does not offer its weights."""
        return (self._port.address,) if self._port is not None else ()

    def load(self) -> None:
        """Read the weights, unless they are already loaded.

        After release(), the source must still contain the same weights, unless it is a model in memory that this
        program trains.

        Raises UnusableWeightsError, MemoryShortError, and the errors of opening a checkpoint.
        """
        if self.weights is not None:
            return
        if self._kept is not None:
            self.weights, self._kept = self._kept, None
            return
        what = "loading the weights"
        weights, signature = self._read(self.source, self._linears(), self._require_memory, what=what)
        is_trained = isinstance(self.source, ModelInMemory) and self.source.reopen is not None
        if self._signature is not None and signature.digest != self._signature.digest and not is_trained:
            raise UnusableWeightsError(
                f"the weights at {self.source} have digest {signature.digest[:12]}, the released weights had "
                f"{self._signature.digest[:12]}: restore the files, or update the weights under a new epoch"
            )
        self.weights, self._signature = weights, signature
        self._offer()

    def release(self) -> None:
        """Release the weights in use and the staged weights.

        Weights that a trainer published and no longer offers stay in memory, and load() uses them again. They may be
        the last copy if the other engines release their weights, too.
        """
        self._staged = None
        source = self.source
        if self.weights is not None and isinstance(source, PublishedModel) and not _is_offered(source):
            logger.warning("keeping the weights in memory: the trainer does not offer %s", source)
            self._kept = self.weights
        self.weights = None
        if self._kept is None:
            self._withdraw()

    def holds(self, source: str) -> bool:
        """Return whether the weights in use are the trainer's weights that `source` names.

        Addresses in `source` are ignored.
        """
        return self.weights is not None and self._is_current(source)

    def _is_current(self, source: str) -> bool:
        return isinstance(self.source, PublishedModel) and names_same_weights(self.source.source, source)

    def use_source(self, source: str) -> None:
        """Make load() read the weights `source` from now on.

        Allowed only while no weights are loaded, or if holds(source).
        """
        is_current = self._is_current(source)
        assert self.weights is None or is_current, "weights are in use: stage() and swap()"
        self.source = self._resolve(source)
        if is_current:  # only addresses have changed
            return
        if not isinstance(self.source, PublishedModel):
            self._kinds = None
        self._signature = self._kept = None
        self._withdraw()

    def stage(self, source: str) -> None:
        """Read and verify new weights of the same model.

        The current weights stay in use. Raises the errors of load().
        """
        self._staged = None
        resolved = self._resolve(source)
        linears, require_memory = self._linears(), self._require_memory
        if self._staging is not None and self.weights is not None:
            linears, require_memory = self._staging(self.weights), require_host_memory
        what = "staging the new weights"
        self._staged = resolved, *self._read(resolved, linears, require_memory, what=what)

    def swap(self, adopt: Callable[[DecoderWeights], DecoderWeights] = lambda staged: staged) -> None:
        """Use the staged weights from now on. adopt: function that gets the staged weights and returns the weights to
        use.
        """
        if self._staged is None:
            raise RuntimeError("swap_weights() without staged weights: stage_weights() first")
        self._withdraw()  # adopt() may write to the memory of the weights in use
        self.source, staged, self._signature = self._staged
        self._staged = None
        self.weights = adopt(staged)
        self._offer()

    def drop_staged(self) -> None:
        self._staged = None

    def _resolve(self, source: str) -> ModelSource:
        if is_published(source):
            return PublishedModel(source, self.config, self.keys_dir)
        return self.in_memory if source == IN_MEMORY and self.in_memory is not None else resolve(source)

    def _offer(self) -> None:
        """If the weights in use come from a trainer, offer them to the same rank of other engines."""
        if self._open_port is None or self.weights is None or not isinstance(self.source, PublishedModel):
            return
        # Loading from files does not need the connection code.
        from megatron_runtime.distributed.weight_port import Offer, OfferedTensors

        try:
            self._port = self._port or self._open_port()
        except (OSError, ValueError) as error:
            logger.error("other engines cannot get weights from this one: %s", error)
            return
        source = PublishedSource.parse(self.source.source)
        tensors = OfferedTensors(self.weights.stored(), epoch=source.epoch, reading=self._reading)
        self._port.offer(Offer(source.session, tensors, part=self._part, digest=self.digest or ""))

    def _withdraw(self) -> None:
        if self._port is not None:
            self._port.offer()

    @property
    def _part(self) -> str:
        return f"rank {self._shard.rank} of {self._shard.sizes.product}"

    @torch.inference_mode()
    def _read(
        self, source: ModelSource, linears: LinearFactory, require_memory: Callable[..., None], *, what: str
    ) -> tuple[DecoderWeights, Signature]:
        if not isinstance(source, PublishedModel):
            with closing(open_checkpoint(source)) as opened:
                weights, signature = self._read_checkpoint(opened, self._kinds, linears, require_memory, what=what)
            self._kinds = signature.kinds
            return weights, signature
        copies = PublishedSource.parse(source.source).copies
        if not copies:
            return self._read_published(source, linears, require_memory, what=what)
        try:
            return self._receive(source, copies, linears, require_memory, what=what)
        except WeightsUnavailableError as error:
            logger.warning("asking the trainer instead: %s", error)
            try:
                return self._read_published(source, linears, require_memory, what=what)
            except WeightsUnavailableError as other:
                raise WeightsUnavailableError(f"{other}; {error}") from error

    def _read_published(
        self, source: PublishedModel, linears: LinearFactory, require_memory: Callable[..., None], *, what: str
    ) -> tuple[DecoderWeights, Signature]:
        with closing(open_checkpoint(source)) as opened:
            return self._read_checkpoint(opened, None, linears, require_memory, what=what)

    def _receive(
        self,
        source: PublishedModel,
        copies: tuple[str, ...],
        linears: LinearFactory,
        require_memory: Callable[..., None],
        *,
        what: str,
    ) -> tuple[DecoderWeights, Signature]:
        """Receive the weights from the same rank of another engine, in the format in which that rank stores them."""
        from megatron_runtime.checkpoints.published import NoValues, WeightStream, receive_stored

        engine = copies[min(self._shard.rank, len(copies) - 1)]
        reference = PublishedSource.parse(source.source)
        with WeightStream(reference, keys_dir=source.keys_dir, engine=engine, part=self._part) as stream:
            require_memory(self.num_bytes, what=what)
            weights = self._load(NoValues(self.config), linears)
            receive_stored(stream, weights.stored())
            return weights, Signature(NoValues(self.config).kinds, stream.digest)

    def _load(self, checkpoint: Checkpoint, linears: LinearFactory) -> DecoderWeights:
        threads = torch.get_num_threads() if isinstance(linears, PackedLinears) else 1
        with _one_thread():
            weights = load_weights(checkpoint, self._dtype, shard=self._shard, linears=linears, threads=threads)
        if isinstance(linears, PackedLinears):
            linears.settle()
        return weights

    def _read_checkpoint(
        self,
        opened: Checkpoint,
        expected: Kinds | None,
        linears: LinearFactory,
        require_memory: Callable[..., None],
        *,
        what: str,
    ) -> tuple[DecoderWeights, Signature]:
        require_same_model(opened.config, wanted=self.config)
        uses_kernels = isinstance(linears, PackedLinears)
        checkpoint = VerifiedCheckpoint(
            opened, expected=expected, uses_kernels=uses_kernels, checks_values=linears.checks_values
        )
        if not _is_mapped(opened, linears):
            require_memory(self.num_bytes, what=what)
        with with_progress(checkpoint, what=what) as shown:
            weights = self._load(shown, linears)
        if not linears.checks_values and not all(map(is_finite, weights.tensors())):
            raise self._not_finite(opened)
        return weights, checkpoint.signature()

    def _not_finite(self, opened: Checkpoint) -> UnusableWeightsError:
        """Return the error for weights that are not finite after conversion.

        This method reads the weights again to find the cause.
        """
        checkpoint = VerifiedCheckpoint(opened)
        try:
            for name in checkpoint.kinds:
                checkpoint.read(name)
        except UnusableWeightsError as error:
            return error
        kind = str(self._dtype).removeprefix("torch.")
        return UnusableWeightsError(
            f"the weights have values beyond the range of {kind}: use another dtype, such as bfloat16"
        )


def _is_mapped(checkpoint: Checkpoint, linears: LinearFactory) -> bool:
    """Return whether the matrices are memory-mapped files. The operating system can then evict their pages."""
    return checkpoint.panels_of is not None and PANEL_FORMATS[checkpoint.panels_of] in linears.panel_formats


@contextmanager
def _one_thread() -> Iterator[None]:
    """Return a context manager, within which torch operations run on one thread.

    Loading runs thousands of short operations. The barrier after each operation costs more than the second thread saves
    (2.9 s of CPU time on two threads, 0.4 s on one, for a quantised 135M model).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_offered(source: PublishedModel) -> bool:
    """Return whether the trainer still offers these weights."""
    # Loading from files does not need the connection code.
    from megatron_runtime.checkpoints.published import is_offered

    return is_offered(source.source, keys_dir=source.keys_dir)
