"""Many clients at once: no error but 429, no leak, and the page stays responsive."""

import http.client
import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.studio.serving import serving

CLIENTS = 64
BODIES = [
    ("/api/tokens", {"model": "bard", "text": "ROMEO:"}),
    ("/api/next", {"model": "bard", "text": "ROMEO:", "top_k": 5}),
    ("/api/lens", {"model": "bard", "text": "But soft, what light"}),
    ("/api/generate", {"model": "bard", "text": "ROMEO:", "max_new_tokens": 8}),
    ("/api/patterns", {"model": "induction", "ids": [1, 2, 3, 1, 2]}),
    ("/api/size", {"preset": "gpt2"}),
    ("/v1/completions", {"model": "bard", "prompt": "To be", "max_tokens": 4}),
    ("/api/tokens", {"model": "unknown", "text": "x"}),
]  # the last is refused, and that is right


def rss(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def hammer(server, seconds):
    """64 clients; returns how often each status came, and the slowest answer of the page meanwhile."""
    host, end = server.address.removeprefix("http://"), time.monotonic() + seconds
    statuses, problems, slowest = Counter(), [], [0.0]

    def one(number):
        connection = http.client.HTTPConnection(host, timeout=120)
        turn = number
        try:
            while time.monotonic() < end:
                path, body = BODIES[turn % len(BODIES)]
                turn += 1
                connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
                reply = connection.getresponse()
                data = reply.read()
                statuses[reply.status] += 1
                if reply.status not in (200, 404, 429) or b'"status":500' in data:
                    problems.append((path, reply.status, data[:200]))
        except Exception as error:
            problems.append((type(error).__name__, str(error)))
        finally:
            connection.close()

    def look():
        while time.monotonic() < end:
            began = time.monotonic()
            server.get("/api/state")
            slowest[0] = max(slowest[0], time.monotonic() - began)
            time.sleep(0.1)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(CLIENTS)] + [threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, problems, slowest[0]


def held(server, seconds, warm_up):
    server.wait_for_torch()
    hammer(server, warm_up)  # allocators, caches and threads reach their size
    time.sleep(1)
    before = rss(server.process.pid)
    statuses, problems, slowest = hammer(server, seconds)
    time.sleep(2)
    after = rss(server.process.pid)
    assert problems == []
    assert statuses[200] > 20
    assert after <= 1.1 * before, (before, after)
    assert server.process.poll() is None
    assert server.post("/api/tokens", {"model": "bard", "text": "a"})[0] == 200  # the queue is empty again
    return statuses, slowest, before, after


@pytest.mark.slow
def test_64_clients_for_a_minute(tmp_path):
    with serving(tmp_path) as server:
        statuses, slowest, before, after = held(server, 60, 10)
    print(f"{dict(statuses)}, slowest state {slowest:.2f} s, memory {before / 1e6:.0f} to {after / 1e6:.0f} MB")
    assert slowest < 2.0
