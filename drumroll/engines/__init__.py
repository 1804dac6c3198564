"""Things that sample: one file each. `SHARED` names the modules here that are not engines."""

SHARED = frozenset({"base", "cache", "sampling", "router"})
