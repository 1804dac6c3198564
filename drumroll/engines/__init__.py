"""Things that sample: one file each. `SHARED` names the modules here that are not engines."""

SHARED = frozenset({"base", "cache", "generate_loop", "response", "router", "sampling", "self_check", "slot_loop", "weights"})
