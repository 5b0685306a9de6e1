"""The checkpoint of weights that a trainer publishes. Blocks are received when they are read.

A rank receives only the rows that it holds, in blocks of about a million values. A block is used only if its SHA-256
matches the manifest, and the manifest only if its SHA-256 matches the reference from the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_runtime.distributed.pair_group import RECEIVER, PairGroup, PairLostError, connect_store, local_address
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames, MalformedMessageError
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.published_weights import (
    OpenSession,
    PublishedSource,
    SessionOpened,
    WeightsManifest,
    WeightsUnavailableError,
    digest_of,
)
from megatron_runtime.transport.peer_link import unreachable_cause
from megatron_runtime.transport.security import TRAINER, KeyFileError, PeerKeys
from megatron_runtime.transport.zmtp.dealer import Dealer

ANSWER_SECONDS = 15.0
"""Timeout, in seconds, for an answer of the trainer."""
CLOSED = -1
"""Sent in place of a tensor number when the rank has received everything."""
_KEPT_BLOCKS = 8
"""Number of blocks that are kept, because consecutive reads of a matrix overlap in the blocks at their ends."""


class PublishedCheckpoint(Checkpoint):
    """The tensors of one session with a trainer. The constructor connects, and close() ends the connection.

    config:   configuration of this engine's model. The trainer's tensors must fit it.
    keys_dir: directory of engine.key and trainer.pub; None: no encryption.

    The constructor and read() raise WeightsUnavailableError, after a timeout if the trainer is stopped or unreachable.
    """

    def __init__(self, source: str, *, config: ModelConfig, keys_dir: Path | None) -> None:
        self.config = config
        self._source = PublishedSource.parse(source)
        opened = asyncio.run(_open(self._source, keys_dir))
        if digest_of(opened.manifest) != self._source.digest:
            raise self._unavailable("its manifest has another digest")
        try:
            manifest = WeightsManifest.from_bytes(opened.manifest)
        except MalformedMessageError as error:
            raise self._unavailable(str(error)) from error
        self._tensors = {tensor.name: (number, tensor) for number, tensor in enumerate(manifest.tensors)}
        self.kinds = {
            tensor.name: TensorKind(tensor.shape, getattr(torch, tensor.dtype)) for tensor in manifest.tensors
        }
        self._blocks: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        try:
            host = self._source.host.strip("[]")
            store = dist.PrefixStore(opened.token, connect_store(host, opened.store_port))
            self._group = PairGroup(store, rank=RECEIVER, host=local_address(host, opened.store_port))
        except (PairLostError, OSError) as error:
            raise self._unavailable(str(error)) from error

    def close(self) -> None:
        with self._lock:
            with contextlib.suppress(PairLostError):  # the trainer may have closed the connection
                self._group.send(torch.tensor([CLOSED, 0]))
            self._group.close()
            self._blocks.clear()

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        _, tensor = self._tensors[name]
        rows, others = (part[0], part[1:]) if part else (slice(None), ())
        start, stop, _ = rows.indices(tensor.shape[0])
        parts = []
        for block in range(start // tensor.block_rows, -(-stop // tensor.block_rows)):
            first = tensor.rows(block).start
            inside = slice(max(start - first, 0), stop - first)
            parts.append(self._block(name, block)[(inside, *others)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _block(self, name: str, block: int) -> torch.Tensor:
        number, tensor = self._tensors[name]
        with self._lock:
            received = self._blocks.get((name, block))
            if received is not None:
                return received
            rows = tensor.rows(block)
            shape = (rows.stop - rows.start, *tensor.shape[1:])
            received = torch.empty(shape, dtype=self.kinds[name].dtype)
            try:
                self._group.send(torch.tensor([number, block]))
                self._group.receive(received)
            except PairLostError as error:
                raise self._unavailable(f"the connection ended at tensor {name!r}: {error}") from error
        if block_digest(received) != tensor.digest(block):
            raise self._unavailable(f"block {block} of tensor {name!r} arrived with other bytes than were published")
        with self._lock:
            self._blocks[name, block] = received
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return received

    def _unavailable(self, cause: str) -> WeightsUnavailableError:
        source = self._source
        return WeightsUnavailableError(
            f"the weights of epoch {source.epoch} are not available from the trainer at {source.address}: {cause}"
        )


def block_digest(block: torch.Tensor) -> bytes:
    """Return the SHA-256 of the bytes of a contiguous tensor on the CPU."""
    return hashlib.sha256(block.reshape(-1).view(torch.uint8).numpy().data).digest()


def is_offered(source: str, *, keys_dir: Path | None) -> bool:
    """Return whether the trainer answers and has the weights that `source` names."""
    try:
        asyncio.run(_open(PublishedSource.parse(source), keys_dir, is_question=True))
    except (WeightsUnavailableError, KeyFileError):
        return False
    return True


async def _open(source: PublishedSource, keys_dir: Path | None, *, is_question: bool = False) -> SessionOpened:
    """Open a session with the trainer. Raises WeightsUnavailableError, and KeyFileError for missing keys."""
    answer: asyncio.Future[SessionOpened] = asyncio.get_running_loop().create_future()

    def receive(frames: Frames) -> None:
        if not answer.done():
            try:
                answer.set_result(SessionOpened.from_bytes(frames[0]))
            except MalformedMessageError as error:
                answer.set_exception(WeightsUnavailableError(f"{source.address}: {error}"))

    def ask() -> None:
        dealer.send([OpenSession(source.session, is_question).to_bytes()])

    dealer = Dealer(
        source.address,
        receive,
        on_open=ask,
        keys=PeerKeys.load(keys_dir, Role.ENGINE, server=TRAINER) if keys_dir is not None else None,
        max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES,
    )
    try:
        opened = await asyncio.wait_for(answer, ANSWER_SECONDS)
    except TimeoutError as error:
        cause = await unreachable_cause(source.address)
        raise WeightsUnavailableError(
            f"no trainer answered at {source.address} within {ANSWER_SECONDS:g} s: {cause}"
        ) from error
    finally:
        dealer.close()
    if opened.error:
        raise WeightsUnavailableError(f"the trainer at {source.address}: {opened.error}")
    return opened
