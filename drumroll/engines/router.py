"""Which engine replica answers which request: a pure function, so that every rank count draws the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.engines.base import GenerateRequest


def route(requests: Sequence[GenerateRequest], replicas: int) -> list[list[GenerateRequest]]:
    """Give each request to the replica with the least work so far (tokens it may have to compute); ties go to the first."""
    shares: list[list[GenerateRequest]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for request in requests:
        replica = min(range(replicas), key=lambda r: load[r])
        shares[replica].append(request)
        load[replica] += len(request.token_ids) + request.n * request.sampling.max_tokens
    return shares
