"""What `marlaas tenant` does."""

import dataclasses
from typing import Any

import yaml

from marlaas_jax.cli.remote import Target, echo, pairs
from marlaas_jax.client.records import Key
from marlaas_jax.errors import InvalidConfig

__all__ = ["Target", "create", "key", "revoke", "show"]


def create(target: Target, name: str, is_admin: bool, weight: float, quotas: list[str], json: bool) -> None:
    """Adds a tenant with a first key."""
    try:
        limits: dict[str, Any] = {field: yaml.safe_load(text) for field, text in pairs(quotas).items()}
    except yaml.YAMLError:
        raise InvalidConfig(f"--quota {quotas}: a value is not readable as YAML") from None
    with target.client() as client:
        tenant = client.create_tenant(name, is_admin=is_admin, weight=weight, quotas=limits)
        made = client.create_key(tenant.id)
    record = dataclasses.asdict(tenant) | {"key": dataclasses.asdict(made)}
    echo(json, record, f"{tenant.id} {tenant.name}\n{_shown_once(made)}")


def show(target: Target, json: bool) -> None:
    """Lists tenants and their keys."""
    with target.client() as client:
        for tenant in client.tenants():
            keys = [f"{key.id} ({key.prefix}...{' revoked' if key.revoked else ''})" for key in tenant.keys]
            words = [
                tenant.id,
                tenant.name,
                *(["admin"] if tenant.is_admin else []),
                *(["disabled"] if tenant.is_disabled else []),
            ]
            echo(
                json,
                dataclasses.asdict(tenant),
                " ".join(words) + f" weight {tenant.weight:g}; keys: {', '.join(keys) or 'none'}",
            )


def key(target: Target, tenant: str, json: bool) -> None:
    """Makes another key."""
    with target.client() as client:
        made = client.create_key(tenant)
    echo(json, dataclasses.asdict(made), _shown_once(made))


def revoke(target: Target, key_id: str, json: bool) -> None:
    """Ends a key."""
    with target.client() as client:
        ended = client.revoke_key(key_id)
    echo(json, dataclasses.asdict(ended), f"{ended.id} ({ended.prefix}...) is revoked")


def _shown_once(made: Key) -> str:
    return f"{made.secret}\n(key {made.id}; it cannot be shown again)"
