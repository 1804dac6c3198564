"""The doctor says what is wrong and what to do, and nothing that is not so."""

from __future__ import annotations

import io
import os
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from drumroll import plugins
from drumroll.verify import doctor
from drumroll.verify.doctor import Finding


def by_name(topic: str) -> dict[str, Finding]:
    return {f.name: f for f in doctor.findings() if f.topic == topic}


def test_every_plugin_of_the_package_is_judged() -> None:
    assert sorted(by_name("backends")) == plugins.names("backends")
    engines = by_name("engines")
    test_only = {name for name in plugins.names("engines") if plugins.for_tests("engines", name)}
    assert test_only == {"scripted"}
    assert set(engines) == set(plugins.names("engines")) - test_only
    assert engines[plugins.EMBEDDED_ENGINE].state == "ok"
    assert by_name("backends")[plugins.SPECIFICATION_BACKEND].state == "ok"


def test_devices_are_those_that_torch_sees() -> None:
    devices = by_name("devices")
    assert devices["cpu"].state == "ok"
    assert ("cuda" in devices) == (not torch.cuda.is_available())


@pytest.mark.parametrize(("gpus", "mib", "told"), [(2, 64, True), (2, 8192, False), (1, 64, False)])
def test_a_container_with_little_shared_memory_is_told_of_beside_gpus(
    gpus: int, mib: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU alone needs none of it."""
    real = shutil.disk_usage
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="a GPU", total_memory=1 << 36))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(total=mib << 20) if str(path) == "/dev/shm" else real(path))
    assert ("shared memory" in by_name("devices")) == told


def test_what_is_not_ok_has_an_advice() -> None:
    assert [f for f in doctor.findings() if f.state != "ok" and not f.advice] == []


def test_versions_are_judged_by_the_declared_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2.11", "numpy<1", "never-made-package>=2", "pytest>1000; extra == 'tools'", "pytest; extra == 'fine'"]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0" if name == "drumroll" else real(name))

    class Meta:
        def get_all(self, key: str) -> list[str]:
            return ["tools", "fine"]

    monkeypatch.setattr(metadata, "metadata", lambda name: Meta())
    packages, extras = by_name("packages"), by_name("extras")
    assert packages["torch"].state == "ok"
    assert packages["torch"].detail == real("torch")
    assert (packages["numpy"].state, packages["numpy"].advice) == ("wrong", "pip install 'numpy<1'")
    assert packages["never-made-package"].detail == "not installed"
    assert (extras["tools"].state, extras["tools"].advice) == ("absent", plugins.install("tools"))
    assert extras["fine"].state == "ok"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///somewhere", "dir_info": {"editable": true}}', "pip install -e '.[x]'"),
        ('{"url": "file:///somewhere", "dir_info": {}}', "pip install 'drumroll[x]'"),
        ('{"url": "https://somewhere/drumroll.whl", "archive_info": {}}', "pip install 'drumroll[x]'"),
        (None, "pip install 'drumroll[x]'"),  # from an index
    ],
)
def test_an_extra_is_installed_the_way_the_package_was(monkeypatch: pytest.MonkeyPatch, origin: str | None, command: str) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return origin if name == "direct_url.json" else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert plugins.install("x") == command


def test_an_extra_of_a_folder_that_is_not_installed_comes_from_that_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert plugins.install("x") == "pip install -e '.[x]'"


def test_a_plugin_that_needs_more_is_absent_with_its_own_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "missing", lambda kind, name: {"never_made": "say please"})
    engine = by_name("engines")[plugins.EMBEDDED_ENGINE]
    assert (engine.state, engine.detail, engine.advice) == ("absent", "needs never_made", "say please")


def test_full_disk_and_locked_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRUMROLL_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("U", (), {"free": 2**30})())
    cache = by_name("folders")["cache"]
    assert cache.state == "wrong"
    assert "1 GiB free" in cache.detail
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not be written" in by_name("folders")["cache"].detail


def test_table_shows_every_finding_at_eighty_columns() -> None:
    out = io.StringIO()
    doctor.show(Console(file=out, width=80, color_system=None))
    text = out.getvalue()
    assert [f.name for f in doctor.findings() if f.name not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 80
