"""The page at /: a chat with the model, one file that needs nothing from elsewhere.

The page is for everybody; what it asks for under /v1 needs an API key where any are set, which its user enters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import FastAPI
from starlette.responses import Response


def add_console(app: FastAPI) -> None:
    page = resources.files(__package__).joinpath("console.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(page),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def console() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    app.add_api_route("/", console, methods=["GET"], include_in_schema=False)


def _policy(page: str) -> str:
    """Only the page's own script and style run, and they reach only the server that they came from."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hashes(page: str, element: str) -> str:
    """Sources of a policy that admit what stands in the elements of this name, and nothing else."""
    bodies = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
