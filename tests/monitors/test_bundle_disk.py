"""Bundles on real disks: as one file, on a full disk, and how many are kept."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from monitors.capture import archive, bundle, manifest, retention, upload
from monitors.capture.manifest import BundleError, Writer, utc
from tests.monitors.cluster import HEALTHY, Cluster, small_fleet, web


def write(root: Path, **files: str) -> Path:
    writer = Writer(root, "small", "test")
    for name, text in files.items():
        writer.add(name.replace("__", "/"), text.encode(), probe="log", start=utc())
    writer.conclude("healthy")
    return writer.folder


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_an_archive_gives_the_bundle_back_and_it_verifies(tmp_path: Path) -> None:
    folder = write(tmp_path, a="one", device__b="two")
    packed = archive.pack(folder)
    assert packed.name == folder.name + ".tar.zst" and packed.read_bytes() == archive.pack(folder, tmp_path / "again").read_bytes()
    again = archive.unpack(packed, tmp_path / "out")
    assert (again / "device/b").read_text() == "two" and manifest.verify(again).ok
    with pytest.raises(BundleError, match="exists already"):
        archive.unpack(packed, tmp_path / "out")
    cut = tmp_path / "cut.tar.zst"
    cut.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(BundleError, match="no whole"):
        archive.unpack(cut, tmp_path / "out2")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "b/../../evil"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    raw = tmp_path / "x.tar"
    with tarfile.open(raw, "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    bad = tmp_path / "x.tar.zst"
    bad.write_bytes(zstandard.compress(raw.read_bytes()))
    with pytest.raises(BundleError, match="no plain file"):
        archive.unpack(bad, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_full_disk_costs_the_items_that_do_not_fit_and_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "640k") as disk:
        writer = Writer(disk, "small", "full")
        assert writer.add("first.txt", b"x" * 1000, probe="log", start=utc())
        assert not writer.add("large.box", b"x" * (2 << 20), probe="black_box", start=utc(), rank=3)
        with contextlib.suppress(OSError), (disk / "others").open("wb") as other:
            while True:
                other.write(b"x" * 4096)
                other.flush()
        for number in range(40):
            assert writer.add("small.txt", b"x" * (50 << 10), probe="log", start=utc()) in (True, False), number
        writer.conclude("hang_unknown")
        found = manifest.load(writer.folder)
        assert manifest.verify(writer.folder).ok
        assert found["outcome"] == "partial" and found["verdict"] == "hang_unknown"
        lost = [item for item in found["items"] if item["outcome"] == "failed"]
        assert lost[0]["rank"] == 3 and "No space left" in lost[0]["reason"] and "2097152 bytes did not fit" in lost[0]["reason"]


def test_what_is_too_much_goes_oldest_first_and_the_newest_stays(tmp_path: Path) -> None:
    made = [write(tmp_path, a="x" * 1000, number=str(number)) for number in range(4)]
    archive.pack(made[0])
    assert retention.prune(tmp_path, most=3, most_bytes=1 << 30, least_free=0) == [made[0].name]
    assert not made[0].exists() and not (tmp_path / f"{made[0].name}.tar.zst").exists()
    assert retention.prune(tmp_path, most=9, most_bytes=1, least_free=0) == [made[1].name, made[2].name]
    assert retention.prune(tmp_path, most=9, most_bytes=1 << 30, least_free=1 << 62) == []
    assert [kept.id for kept in retention.bundles(tmp_path)] == [made[3].name]


def test_captures_of_the_last_hour_are_counted_and_a_clock_set_back_counts_nothing() -> None:
    assert retention.too_often([0.0, 10.0, 20.0], 30.0, 3)
    assert not retention.too_often([0.0, 10.0, 20.0], 3601.0, 3)
    assert not retention.too_often([1e9, 1e9], 30.0, 1)


def test_an_upload_is_the_operators_command_under_a_deadline(tmp_path: Path) -> None:
    packed = tmp_path / "b.tar.zst"
    packed.write_bytes(b"evidence")
    assert upload.upload(["cp", "{bundle}", str(tmp_path / "{id}.copy")], packed, "b", deadline_s=10) == ""
    assert (tmp_path / "b.copy").read_bytes() == b"evidence"
    assert upload.upload(["sh", "-c", "echo no such bucket >&2; exit 3"], packed, "b", deadline_s=10) == "sh: exit status 3: no such bucket"
    assert upload.upload(["sleep", "30"], packed, "b", deadline_s=0.2) == "sleep: not done after 0 s"
    assert "No such file" in upload.upload(["/nonexistent"], packed, "b", deadline_s=1)


def test_a_bundle_whose_capture_was_cut_short_says_so(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "small", "cut")
    writer.add("a.txt", b"a", probe="log", start=utc())
    checked = manifest.verify(writer.folder)
    assert checked.ok and "cut short" in checked.notes[0]
    assert json.loads((writer.folder / "manifest.json").read_text())["end"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_capture_on_a_disk_too_small_for_it_is_judged_by_what_fitted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1000k") as disk, web(HEALTHY) as server, Cluster(tmp_path) as cluster:
        cluster.wedge("symmetric")
        taken = bundle.capture(small_fleet(cluster, server.url).one(), root=disk, budget_s=8.0, progress={"stalled_s": 5.0})
        assert manifest.verify(taken.folder).ok and manifest.load(taken.folder)["outcome"] == "partial"
        lost = [item for item in taken.gaps if "did not fit" in item.reason]
        assert lost and all("No space left" in item.reason for item in lost)
        assert taken.verdict.verdict.is_hang
        assert any(what.reason == lost[0].reason for what in taken.verdict.missing)
