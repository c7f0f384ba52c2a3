"""An S3 server that speaks conditional writes: moto's, of PyPI."""

import re
import subprocess
import sys
import urllib.request

import numpy as np
import optax
import pytest
from site_runs import together, train

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _run, _store


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("moto", reason="moto is in the extra `test`")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(server.stderr.readline, "")  # pyright: ignore
        found = (re.search(r"Running on (http://[\d.:]+)", line) for line in lines)
        url = next(match[1] for match in found if match)
        make = urllib.request.Request(f"{url}/bucket", method="PUT")
        urllib.request.urlopen(make).close()
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/run-7"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_a_member_that_is_renewed_has_another_version(bucket):
    store = _store.Store(bucket)
    key = _run.member_key("oslo", 1, "json")
    assert store.create(key, b"joined")
    found = [_run.versions(store)]
    for _ in range(2):
        _run.renew(store, "oslo", 1)
        found.append(_run.versions(store))
    assert len({x["oslo"] for x in found}) == 3


@pytest.mark.slow
def test_a_run_of_two_sites_and_one_that_comes_later(bucket):
    def run(url, number):
        form = compressors.quantize(4, block=16)
        options = {"every": 2, "max_lag": 0, "poll": 0.01, "compressor": form}
        with sites.Site(url, f"site{number}", quorum=2, **options) as site:
            found = train(site, number, optax.sgd(0.1), steps=6, leave=True)
            return found["kernel"], site.metrics

    found = together({str(n): lambda n=n: run(bucket, n) for n in range(2)})
    (one, metrics), (other, _) = found.values()
    np.testing.assert_array_equal(one, other)
    assert metrics.counted == metrics.round == 3
    _, late = run(bucket, 2)
    assert late.round == 6
    assert late.counted == 3
    with pytest.raises(OSError, match=r"s3://other/run cannot list commits/"):
        run("s3://other/run", 0)
