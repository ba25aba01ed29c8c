"""The files of a dev cluster: written so that a process killed in between leaves no half of one."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from slurm.devcluster import config, hosts
from slurm.devcluster.cgroups import CgroupTree
from slurm.devcluster.config import ClusterShape, Layout
from slurm.devcluster.errors import DevClusterError

_PRIVATE = 0o600
_PUBLIC = 0o644


def stored_shape(layout: Layout) -> ClusterShape | None:
    """The shape that a cluster was brought up with; None where there is no cluster.

    Raises:
        DevClusterError: the directory is somebody else's, or the record cannot be read.
    """
    try:
        return ClusterShape(**json.loads(layout.shape_json.read_text()))
    except FileNotFoundError:
        check_ours(layout)
        return None
    except (TypeError, ValueError) as error:
        raise DevClusterError(
            f"{layout.shape_json} was written by another version or is damaged ({error}); run "
            f"`headrace dev down --name {layout.root.name}` first"
        ) from error


def write(*, shape: ClusterShape, layout: Layout, tree: CgroupTree) -> bool:
    """Write every file that is missing or differs; whether a running daemon has to read it anew."""
    for directory, mode in layout.directories:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(mode)
    # First of all files: it is what marks the directory as a cluster's, for a later `down`.
    _replace(layout.shape_json, json.dumps(dataclasses.asdict(shape), indent=2) + "\n", _PUBLIC)
    for index in range(shape.gpus_per_node):
        _make_gpu(layout.gpu(index))
    if not layout.munge_key.exists():
        _replace(layout.munge_key, secrets.token_hex(64), _PRIVATE)
    changed = False
    for path, (text, mode) in _texts(shape=shape, layout=layout, tree=tree).items():
        if not path.exists() or path.read_text() != text:
            _replace(path, text, mode)
            changed = True
    return changed


def are_current(*, shape: ClusterShape, layout: Layout, tree: CgroupTree) -> bool:
    """Whether the daemons run on what this version of the code would tell them."""
    texts = _texts(shape=shape, layout=layout, tree=tree)
    return all(path.exists() and path.read_text() == text for path, (text, _) in texts.items())


def remove(layout: Layout) -> None:
    """Remove the directory; the mark of a cluster goes last, so a killed `down` can be repeated."""
    check_ours(layout)
    if not layout.root.is_dir():
        return
    for entry in layout.root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != layout.shape_json:
            entry.unlink()
    layout.shape_json.unlink(missing_ok=True)
    layout.root.rmdir()


def check_ours(layout: Layout) -> None:
    """Refuse a directory that holds anything but a cluster.

    Raises:
        DevClusterError: it does.
    """
    if layout.shape_json.exists() or not layout.root.exists():
        return
    if not layout.root.is_dir() or any(
        entry not in {path for path, _ in layout.directories} for entry in layout.root.iterdir()
    ):
        raise DevClusterError(
            f"{layout.root} holds no dev cluster ({layout.shape_json.name} is missing) and is left "
            "alone; choose another --name or --dir, or remove it by hand"
        )


def _texts(*, shape: ClusterShape, layout: Layout, tree: CgroupTree) -> dict[Path, tuple[str, int]]:
    machine = socket.gethostname()
    texts = {
        layout.slurm_conf: (config.slurm_conf(shape=shape, layout=layout), _PUBLIC),
        layout.slurmdbd_conf: (config.slurmdbd_conf(shape=shape, layout=layout), _PRIVATE),
        layout.cgroup_conf: (config.cgroup_conf(cgroup_version=tree.version), _PUBLIC),
        layout.gres_conf: (config.gres_conf(shape=shape, layout=layout), _PUBLIC),
        layout.hosts_file: (config.hosts_text(shape=shape, machine=machine), _PUBLIC),
        layout.nsswitch_conf: (config.nsswitch_text(), _PUBLIC),
    }
    for host in shape.hosts:
        script = hosts.entry_script(shape=shape, layout=layout, host=host, tree=tree)
        texts[layout.entry_script(host)] = (script, _PUBLIC)
    return texts


def _replace(path: Path, text: str, mode: int) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.touch(mode=mode)
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)


def _make_gpu(path: Path) -> None:
    """A device that Slurm takes for a GPU: it looks at the type of the file only."""
    if not path.exists():
        os.mknod(path, 0o666 | stat.S_IFCHR, Path("/dev/null").stat().st_rdev)
