"""Nothing that drumroll starts listens beyond this machine: not the driver, not a rank."""

from __future__ import annotations

import psutil
import pytest

from drumroll import plugins
from drumroll.runtime.local import launch
from drumroll.verify.probe import MakeProbe


@pytest.mark.timeout(120)
def test_ranks_and_driver_listen_on_loopback_alone() -> None:
    with launch(MakeProbe(plugins.SPECIFICATION_BACKEND), 2, "cpu", 60.0, in_process=False):
        here = psutil.Process()
        listening = [
            connection.laddr.ip
            for process in (here, *here.children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    assert len(listening) >= 3  # the store that ranks find each other by, and each rank's end of the collectives
    assert set(listening) == {"127.0.0.1"}
