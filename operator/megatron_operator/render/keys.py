"""Secret `NAME-keys`: CURVE key pairs of one resource. Created once, outside server-side apply, never rewritten."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from megatron_operator.render.context import Manifest, RenderContext, child

KEY_NAMES = ("server.key", "server.pub", "engine.key", "engine.pub", "client.key", "client.pub", "admin.pub")


def keys_secret(ctx: RenderContext, data: Mapping[str, str]) -> Manifest:
    """The Secret for `data`, Z85 text by entry name.

    Raises:
        ValueError: when an entry is missing or unknown.
    """
    if set(data) != set(KEY_NAMES):
        wrong = sorted(set(data) ^ set(KEY_NAMES))
        raise ValueError(f"keys: missing or unknown entries {wrong}; give exactly {list(KEY_NAMES)}")
    encoded = {name: base64.b64encode(data[name].encode()).decode() for name in KEY_NAMES}
    return child(ctx, "Secret", ctx.keys_name, type="Opaque", immutable=True, data=encoded)
