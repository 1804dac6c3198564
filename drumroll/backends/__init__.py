"""Things that train: one file or folder each. `SHARED` names the modules here that are not backends."""

SHARED = frozenset(
    (
        *("adapters", "base", "buckets", "clip", "division", "engine", "footprint", "optim", "placement"),
        *("replicas", "ring", "rows", "shards", "sleeping", "spans", "state"),
    )
)
