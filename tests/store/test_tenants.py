"""Tenants and keys: secrets are shown once and kept as hashes; a revoked key and a disabled tenant are refused."""

import hashlib
import re

import pytest
import sqlalchemy as sa

from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.store import schema, tenants


@pytest.fixture
def acme(store):
    return store.write(tenants.create_tenant, "acme", now=1.0, weight=2.0, quotas={"max_running_jobs": 2}).result(10)


def test_a_tenant_is_found_by_id_and_name_and_changed(store, acme):
    assert re.fullmatch(r"ten_[0-9A-Za-z]{22}", acme.id)
    assert store.read(tenants.get_tenant, acme.id) == store.read(tenants.get_tenant, "acme") == acme
    changed = store.write(tenants.update_tenant, acme.id, weight=4.0, quotas={}).result(10)
    assert (changed.weight, changed.quotas, changed.name) == (4.0, {}, "acme")
    assert store.write(tenants.update_tenant, acme.id).result(10) == changed
    other = store.write(tenants.create_tenant, "Zeta", now=2.0, is_admin=True).result(10)
    assert {tenant.id for tenant in store.read(tenants.list_tenants)} == {acme.id, other.id}
    with pytest.raises(NotFound, match="ten_x: no such tenant"):
        store.write(tenants.update_tenant, "ten_x", weight=1.0).result(10)


def test_names_that_are_taken_or_not_allowed_are_refused(store, acme):
    for name in ("acme", "", "a b", "-a", "x" * 65, "a\n", "../a"):
        with pytest.raises(InvalidRequest, match="name="):
            store.write(tenants.create_tenant, name, now=2.0).result(10)


def test_weights_that_are_not_allowed_are_refused(store, acme):
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="weight="):
            store.write(tenants.update_tenant, acme.id, weight=weight).result(10)


def test_a_key_is_kept_as_its_hash_and_finds_its_tenant(store, acme):
    key, secret = store.write(tenants.create_key, acme.id, now=2.0).result(10)
    assert re.fullmatch(r"mj-[0-9A-Za-z_-]{43}", secret) and re.fullmatch(r"key_[0-9A-Za-z]{22}", key.id)
    assert key.prefix == secret[:8]
    assert store.read(tenants.find_tenant, secret) == acme
    (row,) = store.read(lambda c: c.execute(sa.select(schema.api_keys)).all())
    assert row.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert not any(secret in str(value) for value in row)
    for wrong in ("", secret[:-1], secret.lower(), "\ud800", row.hash):
        assert store.read(tenants.find_tenant, wrong) is None


def test_a_revoked_key_and_a_disabled_tenant_are_refused(store, acme):
    (first, first_secret), (_, second_secret) = [
        store.write(tenants.create_key, "acme", now=float(n)).result(10) for n in (2, 3)
    ]
    revoked = store.write(tenants.revoke_key, first.id, tenant_id=acme.id, now=4.0).result(10)
    again = store.write(tenants.revoke_key, first.id, tenant_id=None, now=9.0).result(10)
    assert revoked.revoked == again.revoked == 4.0
    assert store.read(tenants.find_tenant, first_secret) is None
    assert store.read(tenants.find_tenant, second_secret) == acme
    store.write(tenants.update_tenant, acme.id, is_disabled=True).result(10)
    assert store.read(tenants.find_tenant, second_secret) is None
    assert [key.revoked for key in store.read(tenants.list_keys, acme.id)] == [4.0, None]


def test_another_tenants_key_is_as_if_it_did_not_exist(store, acme):
    other = store.write(tenants.create_tenant, "other", now=1.0).result(10)
    key, secret = store.write(tenants.create_key, acme.id, now=2.0).result(10)
    for key_id in (key.id, "key_x"):
        with pytest.raises(NotFound, match=f"{key_id}: no such key"):
            store.write(tenants.revoke_key, key_id, tenant_id=other.id, now=3.0).result(10)
    assert store.read(tenants.find_tenant, secret) == acme
