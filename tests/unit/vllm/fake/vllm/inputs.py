from typing import Any


def tokens_input(prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None) -> Any:
    given = {"prompt": prompt, "cache_salt": cache_salt}
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"type": "token", "prompt_token_ids": prompt_token_ids, **chosen}
