"""The TCPStore wire protocol, pure: bytes in, requests out, and back.

Nothing in here knows sockets, threads, clocks or asyncio. `opcodes` and `limits` are the tables; `parser`
turns a stream of bytes into calls of one handler method per request, as `requests` describes; `encoding`
writes requests and replies.
"""
