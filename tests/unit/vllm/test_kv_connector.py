"""The requests by which vLLM's NixlConnector exports and imports the KV of a prompt, on the fake vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eventually import eventually

from megatron_runtime.engine.backend import Capability, UnsupportedVerbError
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.kv_port import ConnectorPort
from megatron_runtime.engine.kv_transfer import ExportedBlocks, TransferEndedError
from megatron_runtime.protocol.codec import pack, unpack
from megatron_runtime.protocol.messages import Transfer
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import Running, Start, adapter_of, answer, lines, logged, weights_of

PROMPT = list(range(100, 150))
NIXL: dict[str, Any] = {"vllm_allow_nixl": True, "prefix_caching": True}


async def serving(start: Start, role: str, **settings: Any) -> Running:
    running = await start(role=role, **NIXL, **settings)
    running.backend.kv_connector.listen("127.0.0.1", 0)
    await running.backend.load()
    await running.backend.unpause()
    return running


async def prefill(
    running: Running, number: int, prompt: list[int], *, adapter: str = "", **params: Any
) -> RequestOutput:
    tokens, nothing = np.array(prompt, dtype=np.int32), np.array([], dtype=np.int32)
    request = EngineRequest(number, tokens, nothing, SamplingParams(**params), adapter=adapter, prefill_only=True)
    running.backend.submit(request)
    [output] = await running.listener.end_of(number)
    assert running.listener.tokens(number) == [], "an export samples nothing"
    return output


async def with_adapter(running: Running, directory: Path) -> None:
    assert not (await running.backend.load_adapter("sql@1", str(directory))).failed


async def exported(running: Running, number: int = 1, **params: Any) -> ExportedBlocks:
    blocks = (await prefill(running, number, PROMPT, **params)).exported
    assert blocks is not None
    return blocks


async def test_an_import_is_a_prefix_hit_of_the_request(start: Start, model: Path, fake_vllm: Path) -> None:
    source, target = await serving(start, "prefill"), await serving(start, "decode")
    assert source.backend.kv_connector.layout == target.backend.kv_connector.layout != ""
    blocks = await exported(source, cache_salt="a", top_k=3)
    assert blocks.digests == block_digests(PROMPT, 16, salt=b"a")
    port = ConnectorPort(target.backend.kv_connector)
    transfer = Transfer(1, 2, b"", b"".join(blocks.digests), blocks.weights, "", 30.0, "tcp://h:1", blocks.handle)
    imported = await port.receive(transfer)
    assert (imported.ok, imported.received_bytes) == (True, 3 * target.backend.kv_connector.block_bytes)
    assert lines(fake_vllm, f"import 2 from fake-{source.backend.kv_connector.address[1]} [[1, 2]]") == 1
    assert lines(fake_vllm, "begin 2 0 a") == 1
    assert target.listener.outputs == [], "an import answers no request"
    target.submit(3, PROMPT, num_tokens_to_generate=5)
    await target.listener.end_of(3)
    assert target.listener.tokens(3) == answer(PROMPT, 5, weights_of(model))
    assert lines(fake_vllm, "hit 3") == 1


async def test_blocks_of_other_weights_or_without_a_handle_are_not_imported(start: Start, fake_vllm: Path) -> None:
    source, target = await serving(start, "prefill"), await serving(start, "decode")
    blocks, kv = await exported(source), target.backend.kv_connector
    await target.backend.set_epoch(1)
    with pytest.raises(TransferEndedError, match=r"the blocks are of the weights '0 .*', this engine has '1 "):
        await kv.receive(2, blocks.weights, blocks.handle)
    await target.backend.set_epoch(0)
    damaged = ([1, 2], [{}, b"123", "", ""], [{}, [1], "", ""], [{}, b"1234", "", 1])
    for handle in (b"", b"\xc1", *map(pack, damaged)):
        with pytest.raises(TransferEndedError, match="no handle of a vLLM engine of this release"):
            await kv.receive(2, blocks.weights, handle)
    assert lines(fake_vllm, "begin 2 0 None") == 0


async def test_blocks_of_an_adapter_are_imported_for_this_adapter_only(
    start: Start, model: Path, tmp_path: Path, fake_vllm: Path
) -> None:
    lora = {"enable_lora": True}
    directory = adapter_of(tmp_path / "sql", size=5)
    source = await serving(start, "prefill", vllm_arguments=lora)
    target = await serving(start, "decode", vllm_arguments=lora)
    await with_adapter(source, directory)
    blocks, kv = await exported(source, adapter="sql@1"), target.backend.kv_connector
    assert blocks.digests == block_digests(PROMPT, 16, adapter="sql@1")
    with pytest.raises(TransferEndedError, match="of the adapter sql@1, which this engine has not loaded"):
        await kv.receive(2, blocks.weights, blocks.handle)
    await with_adapter(target, directory)
    await kv.receive(3, blocks.weights, blocks.handle)
    for number, adapter in ((4, ""), (5, "sql@1")):
        target.submit(number, PROMPT, adapter=adapter, num_tokens_to_generate=5)
    await target.listener.end_of(4, 5)
    assert (lines(fake_vllm, "hit 4"), lines(fake_vllm, "hit 5")) == (0, 1)
    assert target.listener.tokens(5) == answer(PROMPT, 5, weights_of(model) + 5)


async def test_an_adapter_is_unloaded_after_its_imports_have_ended(
    start: Start, tmp_path: Path, fake_vllm: Path
) -> None:
    lora = {"enable_lora": True}
    source = await serving(start, "prefill", vllm_arguments=lora)
    target = await serving(start, "decode", vllm_arguments=lora)
    directory = adapter_of(tmp_path / "sql", size=5)
    await with_adapter(source, directory)
    await with_adapter(target, directory)
    blocks = await exported(source, adapter="sql@1")
    await target.backend._process.call("pause")  # the import does not end
    importing = asyncio.create_task(target.backend.kv_connector.receive(2, blocks.weights, blocks.handle))

    async def has_begun() -> bool:
        return lines(fake_vllm, "begin 2 0 None") == 1

    await eventually(has_begun, what="vLLM has the import")
    assert not (await target.backend.unload_adapter("sql@1")).failed
    with pytest.raises(TransferEndedError, match="the adapter sql@1 was unloaded"):
        await importing
    assert logged(fake_vllm).index("end 2") < logged(fake_vllm).index("remove_lora 1")


async def test_an_import_that_vllm_computed_itself_is_reported(start: Start) -> None:
    source, target = await serving(start, "prefill"), await serving(start, "decode")
    blocks = await exported(source)
    parameters, *rest = unpack(blocks.handle)
    lost = pack([{**parameters, "remote_engine_id": "lost"}, *rest])
    with pytest.raises(TransferEndedError, match="vLLM could not read the blocks, and has computed the prompt"):
        await target.backend.kv_connector.receive(2, blocks.weights, lost)


async def test_a_release_ends_an_import(start: Start, fake_vllm: Path) -> None:
    source, target = await serving(start, "prefill"), await serving(start, "decode")
    blocks = await exported(source)
    await target.backend.pause()
    importing = asyncio.create_task(target.backend.kv_connector.receive(2, blocks.weights, blocks.handle))
    await asyncio.sleep(0)
    await target.backend.abort(2)
    with pytest.raises(TransferEndedError, match="it was released"):
        await importing
    await target.backend.unpause()
    assert target.listener.outputs == []


async def test_exports_take_a_quarter_of_the_cache_until_they_are_released(start: Start) -> None:
    source = await serving(start, "prefill")
    whole = list(range(200, 400))  # 13 blocks of 16 tokens; the cache has 64
    assert (await prefill(source, 1, whole)).exported is not None
    rejected = await prefill(source, 2, whole)
    assert rejected.exported is None
    assert "exports hold 13 blocks of 64, and the prompt has 13: raise the KV cache" in str(rejected.error)
    await source.backend.abort(1)
    assert (await prefill(source, 3, whole)).exported is not None


async def test_an_export_in_progress_is_released(start: Start, fake_vllm: Path) -> None:
    source = await serving(start, "prefill")
    tokens, nothing = np.array(PROMPT, dtype=np.int32), np.array([], dtype=np.int32)
    source.backend.submit(EngineRequest(1, tokens, nothing, SamplingParams(), prefill_only=True))
    await source.backend.abort(1)

    async def has_ended() -> bool:
        return lines(fake_vllm, "begin 1 0 None") == lines(fake_vllm, "end 1")

    await eventually(has_ended, what="vLLM has dropped the export")
    assert source.listener.outputs == []


async def test_engines_of_one_and_of_two_ranks_have_different_layouts(start: Start) -> None:
    from megatron_runtime.distributed.shard import ParallelSizes

    one = (await serving(start, "prefill", kv_cache_memory=1 << 20)).backend.kv_connector
    sizes = ParallelSizes(tensor=2)
    two = (await serving(start, "decode", kv_cache_memory=1 << 20, parallel=sizes)).backend.kv_connector
    assert one.layout != two.layout
    assert two.block_bytes == 2 * one.block_bytes, "the caches of both ranks have a part of each block"


async def test_a_role_needs_the_consent_to_nixl(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start(role="decode", prefix_caching=True)
    with pytest.raises(UnsupportedVerbError, match=r"authenticates no peer \(--vllm-allow-nixl, spec\.engine\.vllm\."):
        running.backend.info.require("--role decode", Capability.KV_TRANSFER)
    both = {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}
    with pytest.raises(ValueError, match="kv_transfer_config is set by --role: remove one"):
        await start(role="decode", vllm_arguments=both, **NIXL)


@pytest.mark.parametrize(("role", "own", "limit"), [("prefill", None, 0), ("decode", None, 256), ("decode", 99, 99)])
def test_the_arguments_of_a_role(model: Path, role: Any, own: int | None, limit: int) -> None:
    from megatron_runtime.backends.vllm.arguments import engine_arguments
    from megatron_runtime.engine.settings import EngineSettings

    settings = EngineSettings(coordinator="tcp://h:1", name="e", role=role, max_prefill_tokens=own, **NIXL)
    arguments = engine_arguments(settings, model, cache_events="ipc:///unused")
    transfer = arguments.kv_transfer_config
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", "kv_both")
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert arguments.long_prefill_token_threshold == limit


@pytest.mark.parametrize(
    ("sizes", "nodes", "exchanges"),
    [
        ({"tensor": 2}, 1, True),
        ({"tensor": 2, "expert": 2}, 1, True),
        ({"tensor": 2}, 2, False),
        ({"pipeline": 2}, 1, False),
        ({"data": 2}, 1, False),
    ],
)
def test_ranks_that_share_layers_in_one_pod_exchange_kv(
    sizes: dict[str, int], nodes: int, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_runtime.backends.vllm.arguments import transfers_kv
    from megatron_runtime.distributed.shard import ParallelSizes
    from megatron_runtime.engine.settings import EngineSettings

    monkeypatch.setenv("NNODES", str(nodes))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    settings = EngineSettings(coordinator="tcp://h:1", name="e", role="decode", parallel=ParallelSizes(**sizes), **NIXL)
    assert transfers_kv(settings) == exchanges
