"""The tunable is added to what the user has set, and never overrides it."""

import sys

import pytest

from marlaas_jax.device import huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone reads it")
def test_environment():
    assert huge_pages.environment({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    others = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert huge_pages.environment(others) == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    assert huge_pages.environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}
