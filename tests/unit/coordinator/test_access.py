"""With keys the port is the role, and a key opens the port of its role only."""

import pytest

from megatron_runtime.control_link import ControlLink
from megatron_runtime.inference_client import CoordinatorUnreachableError, InferenceClient
from megatron_runtime.wire.headers import Header, Role
from megatron_runtime.wire.security import PeerKeys, generate_key_files


@pytest.fixture
def keys_dir(tmp_path):
    for name, text in generate_key_files().items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def test_every_role_works_with_its_own_key(stage, params, keys_dir) -> None:
    stage.coordinator(keys_dir=keys_dir)
    await stage.engine(keys=PeerKeys.load(keys_dir, Role.ENGINE))
    client = await stage.client(keys=PeerKeys.load(keys_dir, Role.CLIENT))
    link = await stage.admin(keys=PeerKeys.load(keys_dir, Role.ADMIN))
    assert await client.add_request([1], params(1))
    assert (await link.control(Header.PAUSE, operation_id="p", fence=1, expected_engines=1)).ranks == 1


@pytest.mark.parametrize("key", [Role.CLIENT, Role.ENGINE, None], ids=str)
async def test_another_roles_key_or_none_does_not_open_the_admin_port(stage, keys_dir, key) -> None:
    coordinator = stage.coordinator(keys_dir=keys_dir)
    keys = PeerKeys.load(keys_dir, key) if key is not None else None
    with pytest.raises(CoordinatorUnreachableError, match="keys"):
        await ControlLink(stage.address(Role.ADMIN), keys=keys).start(connect_timeout_seconds=0.5)
    assert len(coordinator.clients) == 0
    assert coordinator.transport.gatekeeper.refused >= (key is not None)


async def test_a_client_without_a_key_stays_out(stage, keys_dir) -> None:
    stage.coordinator(keys_dir=keys_dir)
    with pytest.raises(CoordinatorUnreachableError):
        await InferenceClient(stage.address(Role.CLIENT)).start(connect_timeout_seconds=0.5)


async def test_a_bounded_number_of_clients(stage) -> None:
    coordinator = stage.coordinator(max_clients=2)
    first, _ = await stage.client(), await stage.client()
    with pytest.raises(CoordinatorUnreachableError):
        await InferenceClient(stage.address(Role.CLIENT)).start(connect_timeout_seconds=0.3)
    first.stop()
    await stage.until(lambda: len(coordinator.clients) == 1)
    await stage.client()
