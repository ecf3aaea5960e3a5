"""The store itself, pure: keys, queues, waits and barriers.

Nothing in here knows sockets, threads, clocks, asyncio or the wire. A client is a *member*: any hashable
object, which the caller chooses. An operation that ends the waiting of members returns them; the caller
tells them.
"""

from rallypoint.store.engine.engine import Engine

__all__ = ["Engine"]
