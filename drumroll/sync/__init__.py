"""Moving weights from training to sampling: one file a transport. `SHARED` names the modules here that are not transports."""

SHARED = frozenset({"base"})
