"""The store server: `core/` answers, `loops/` moves bytes, `process/` starts it, `reporting/` tells of it.

Clients are in `stores/client/`, and relays in `relay/`.
"""
