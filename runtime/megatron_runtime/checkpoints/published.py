"""Receives the weights that a trainer has published, from the trainer or from an engine.

A trainer sends the tensors of a checkpoint. An engine sends its tensors in the form in which it stores them.

A received block is used only if its SHA-256 matches the manifest. A manifest of whole tensors must match the digest in
the reference that the coordinator has sent. A manifest of one rank's part of the tensors is authenticated by the
engine's key.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Self

import torch

from megatron_runtime.checkpoints.source import Trainer
from megatron_runtime.distributed.weight_port import (
    BLOCK_REQUEST,
    EXCHANGE_SECONDS,
    block_bytes,
    block_digest,
    entry_of,
)
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind, tensor_shapes
from megatron_runtime.process.progress import PROGRESS, Stage
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
from megatron_runtime.transport.zmtp.dealer import Dealer, parse_address

ANSWER_SECONDS = 15.0
"""Timeout, in seconds, for an answer from the trainer, and for the connection to an engine."""
DIGEST_SECONDS = 300.0
"""Timeout, in seconds, for the answer from a connected engine, which may have to compute the digests of its weights."""
_KEPT_BLOCKS = 8
"""Number of blocks that are kept, because consecutive reads of a matrix overlap in their first and last blocks."""


class WeightStream:
    """One session with a trainer or with a rank of an engine, from which tensors are received in blocks.

    The constructor connects. Only one thread may use an instance.

    engine:   address of an engine's rank; empty for the trainer that `source` names.
    part:     see OpenSession.
    keys_dir: directory of engine.key, and of trainer.pub or engine.pub; None means no encryption.

    The constructor and all methods raise WeightsUnavailableError if the trainer or engine cannot send the weights. If
    the trainer or engine hangs or is unreachable, they raise the error after a timeout.
    """

    def __init__(self, source: PublishedSource, *, keys_dir: Path | None, engine: str = "", part: str = "") -> None:
        self._source = source
        self._where = f"engine at {engine}" if engine else f"trainer at {source.address}"
        opened = asyncio.run(_open(source, keys_dir, engine=engine, part=part))
        if not part and digest_of(opened.manifest) != source.digest:
            raise self.unavailable("its manifest has another digest")
        self.manifest_data = opened.manifest
        try:
            self.manifest = WeightsManifest.from_bytes(opened.manifest)
            address = parse_address(engine or source.address)
            self._socket = socket.create_connection(address, EXCHANGE_SECONDS)  # type: ignore[arg-type]
            self._socket.sendall(opened.token.encode())
        except (MalformedMessageError, OSError) as error:
            raise self.unavailable(str(error)) from error
        self.digest = opened.digest
        """SessionOpened.digest of this session."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def block(self, tensor: int, block: int) -> torch.Tensor:
        """Receive and verify block `block` of tensor `tensor` in the manifest, and return its bytes."""
        received = self.receive(tensor, block)
        self.verify(tensor, block, received)
        return received

    def receive(self, tensor: int, block: int) -> torch.Tensor:
        entry = self.manifest.tensors[tensor]
        rows = entry.rows(block)
        received = torch.empty((rows.stop - rows.start, *entry.shape[1:]), dtype=getattr(torch, entry.dtype))
        rest = block_bytes(received)
        try:
            self._socket.sendall(BLOCK_REQUEST.pack(tensor, block))
            while rest:
                count = self._socket.recv_into(rest)
                if not count:
                    raise ConnectionError("the other side closed it")
                rest = rest[count:]
        except OSError as error:
            raise self.unavailable(f"the connection ended at tensor {entry.name!r}: {error}") from error
        return received

    def verify(self, tensor: int, block: int, received: torch.Tensor) -> None:
        """Raise WeightsUnavailableError unless the received block matches the manifest. Any thread may call this."""
        entry = self.manifest.tensors[tensor]
        if block_digest(received) != entry.digest(block):
            raise self.unavailable(
                f"block {block} of tensor {entry.name!r} arrived with other bytes than were published"
            )

    def unavailable(self, cause: str) -> WeightsUnavailableError:
        return WeightsUnavailableError(
            f"the weights of epoch {self._source.epoch} are not available from the {self._where}: {cause}"
        )


class PublishedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are received from a trainer. close() ends the connection to the trainer.

    config:   configuration of this engine's model. The trainer's tensors must fit it.
    keys_dir: as in WeightStream.

    Raises the errors of WeightStream.
    """

    def __init__(self, source: str, *, config: ModelConfig, keys_dir: Path | None) -> None:
        self.config = config
        self._stream = WeightStream(PublishedSource.parse(source), keys_dir=keys_dir)
        self._tensors = {tensor.name: (number, tensor) for number, tensor in enumerate(self._stream.manifest.tensors)}
        self.kinds = {
            name: TensorKind(tensor.shape, getattr(torch, tensor.dtype)) for name, (_, tensor) in self._tensors.items()
        }
        self._blocks: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._stream.close()
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
        number = self._tensors[name][0]
        with self._lock:
            received = self._blocks.get((name, block))
            if received is not None:
                return received
            received = self._stream.receive(number, block)
        self._stream.verify(number, block, received)
        with self._lock:
            self._blocks[name, block] = received
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return received


class NoValues(Checkpoint):
    """A checkpoint of a model whose values do not matter, for matrices that are overwritten afterwards."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        family = FAMILIES[config.family]
        self.kinds = {
            family.hf_name(name): TensorKind(shape, torch.bfloat16) for name, shape in tensor_shapes(config).items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        kind = self.kinds[name]
        return torch.zeros((), dtype=kind.dtype).expand(kind.shape)[part]


def receive_stored(stream: WeightStream, targets: list[tuple[str, torch.Tensor]]) -> None:
    """Receive the tensors of an engine's rank.

    targets: name and destination of each tensor, in the order of the rank's manifest.
    """
    kinds = [(entry.name, entry.shape, entry.dtype) for entry in stream.manifest.tensors]
    expected = [(entry.name, entry.shape, entry.dtype) for entry in (entry_of(*target) for target in targets)]
    if kinds != expected:
        other = next((pair for pair in zip(kinds, expected, strict=False) if pair[0] != pair[1]), None)
        raise stream.unavailable(f"it stores other tensors than this engine: {other or (len(kinds), len(expected))}")
    size, done = sum(target.nbytes for _, target in targets), 0
    for number, (_, target) in enumerate(targets):
        PROGRESS.report(Stage.LOAD, done, size)
        entry = stream.manifest.tensors[number]
        for block in range(entry.num_blocks):
            target[entry.rows(block)].copy_(stream.block(number, block))
        done += target.nbytes


def newest(trainer: Trainer) -> PublishedSource:
    """Return the reference of the weights that `trainer` has published last.

    Raises WeightsUnavailableError, KeyFileError, and ValueError if the address is not "HOST:PORT".
    """
    host, separator, port = trainer.address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"address {trainer.address!r} of a trainer: want HOST:PORT")
    opened = asyncio.run(_open(PublishedSource(host, int(port), 0, ""), trainer.keys, is_question=True))
    return PublishedSource.parse(f"trainer://{trainer.address}/{opened.digest}")


def is_offered(source: str, *, keys_dir: Path | None) -> bool:
    """Return whether the trainer responds and has the weights that `source` names."""
    try:
        asyncio.run(_open(PublishedSource.parse(source), keys_dir, is_question=True))
    except (WeightsUnavailableError, KeyFileError):
        return False
    return True


async def _open(
    source: PublishedSource, keys_dir: Path | None, *, is_question: bool = False, engine: str = "", part: str = ""
) -> SessionOpened:
    """Open a session with the trainer or with the engine at the address `engine`.

    is_question, part: as in OpenSession.

    Raises WeightsUnavailableError, and KeyFileError if keys are missing.
    """
    answer: asyncio.Future[SessionOpened] = asyncio.get_running_loop().create_future()
    connected = asyncio.Event()
    who, address = ("engine", engine) if engine else (TRAINER, source.address)

    def receive(frames: Frames) -> None:
        if not answer.done():
            try:
                answer.set_result(SessionOpened.from_bytes(frames[0]))
            except MalformedMessageError as error:
                answer.set_exception(WeightsUnavailableError(f"{address}: {error}"))

    def ask() -> None:
        connected.set()
        dealer.send([OpenSession(source.session if source.digest else "", is_question, part).to_bytes()])

    def lost(reason: str) -> None:
        if engine and not answer.done():
            answer.set_exception(WeightsUnavailableError(f"the engine at {address} ended the connection: {reason}"))

    dealer = Dealer(
        address,
        receive,
        on_open=ask,
        on_lost=lost,
        keys=PeerKeys.load(keys_dir, Role.ENGINE, server=who) if keys_dir is not None else None,
        max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES,
    )
    try:
        if engine:
            await asyncio.wait_for(connected.wait(), ANSWER_SECONDS)
        opened = await asyncio.wait_for(answer, DIGEST_SECONDS if engine else ANSWER_SECONDS)
    except TimeoutError as error:
        cause = await unreachable_cause(address, who, remedy=f"check that the {who} runs")
        raise WeightsUnavailableError(f"no {who} answered at {address} within {ANSWER_SECONDS:g} s: {cause}") from error
    finally:
        dealer.close()
    if opened.error:
        raise WeightsUnavailableError(f"the {who} at {address}: {opened.error}")
    return opened
