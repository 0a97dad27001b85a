"""Ids and keys that nobody can guess."""

import hashlib
import secrets
import string

BASE62 = string.digits + string.ascii_letters


def new_id(prefix: str) -> str:
    """Returns the prefix and 22 random characters: 131 bits."""
    return prefix + "".join(secrets.choice(BASE62) for _ in range(22))


def new_secret() -> str:
    """Returns an API key, `mj-` and 43 characters: 256 bits. It is shown once; the store keeps its hash."""
    return "mj-" + secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    """Returns what the store keeps of an API key. Plain SHA-256 does: nobody tries out 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
