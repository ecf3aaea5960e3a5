"""A store is served, written and read by the package that is installed: `python smoke.py compiled`."""

from __future__ import annotations

import sys

from rallypoint import TCPStore
from rallypoint.build import in_use

if __name__ == "__main__":
    assert in_use() == sys.argv[1], in_use()
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        store.set("key", b"value")
        assert store.get("key") == b"value"
        assert store.add("sum", 2) + store.add("sum", 3) == 7
    print(f"a store that is {in_use()} is served, written and read")
