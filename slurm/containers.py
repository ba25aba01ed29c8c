"""The container that a job's ranks run in. The batch step before them stays on the host.

What Headrace needs inside is put there without being asked for: the job's folder, the code, the
files that credentials and certificates are in, and the variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from storage.errors import SpecError
from storage.job import JobDescription
from storage.spec import Model

_MOUNT = re.compile(r"(?P<source>/[^:,]*)(:(?P<target>/[^:,]*))?(:(?P<mode>r[ow]))?")
_FILES = ("AWS_CA_BUNDLE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "SSL_CERT_FILE")
"""Variables that name files which a rank reads."""
_INHERITED = (*_FILES, "AWS_PROFILE", "TZ")
_TOLD = ("HEADRACE_MASTER_ADDR", "HEADRACE_MASTER_PORT", "HEADRACE_NODES", "PYTHONPATH")
"""Variables that the batch step sets for the ranks."""

_OURS = {
    "pyxis": ("--container-image", "--container-mounts", "--container-workdir", "--container-env"),
    "apptainer": ("--bind", "-B", "--pwd", "--cwd", "--cleanenv", "-e", "--containall", "-C"),
}


class ContainerSpec(Model):
    """An image for the ranks, and how it is run."""

    kind: Literal["pyxis", "apptainer"] = Field(
        description="`pyxis` gives srun the --container options of that plug-in; `apptainer` puts "
        "`apptainer exec` before each rank's command."
    )
    image: str = Field(
        description="An absolute path (.sqsh, .sif), or what names an image in a registry."
    )
    mounts: tuple[str, ...] = Field(
        (),
        description="Further folders, as `/from`, `/from:/to` or `/from:/to:ro`: data, tokenizer, "
        "scratch. What Headrace itself needs is mounted anyway.",
    )
    python: str = Field(
        "python3", min_length=1, description="The interpreter inside, with headrace[trainer]."
    )
    flags: tuple[str, ...] = Field(
        (),
        description="Further options, each with its value in one item: of srun for `pyxis` "
        "(`--container-mount-home`), of `apptainer exec` otherwise (`--rocm`).",
    )

    @field_validator("image", "python")
    @classmethod
    def _is_one_word(cls, text: str) -> str:
        if not text.isprintable() or text.startswith("-") or text != text.strip() or not text:
            raise ValueError(
                f"value {text!r} must be one line that does not begin with '-' or white space; "
                "correct it"
            )
        return text

    @field_validator("mounts")
    @classmethod
    def _mounts_are_absolute(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if not mount.isprintable() or not _MOUNT.fullmatch(mount):
                raise ValueError(
                    f"mounts: {mount!r} must be absolute paths without ',', as `/from`, "
                    "`/from:/to` or `/from:/to:ro`; correct it"
                )
        return mounts

    @model_validator(mode="after")
    def _image_is_found_from_anywhere(self) -> ContainerSpec:
        looks_local = self.image.startswith(".") or self.image.endswith((".sif", ".sqsh"))
        if self.kind == "apptainer":
            looks_local = looks_local or "://" not in self.image
        if looks_local and "://" not in self.image and not self.image.startswith("/"):
            raise ValueError(
                f"image {self.image!r} must be an absolute path on the nodes, or name its registry "
                "(docker://…): jobs work in folders of their own; write it in full"
            )
        return self

    @model_validator(mode="after")
    def _flags_leave_ours_alone(self) -> ContainerSpec:
        for flag in self.flags:
            name = flag.partition("=")[0]
            if not flag.isprintable() or not flag.startswith("-"):
                raise ValueError(
                    f"flags: {flag!r} must be an option that begins with '-', on one line; give an "
                    "option and its value as one item, `--name=value`"
                )
            if name in _OURS[self.kind]:
                raise ValueError(
                    f"flags: {flag!r} is set by Headrace itself, or would keep from the ranks what "
                    "they are told; use container.image and container.mounts, or remove it"
                )
            if self.kind == "pyxis" and not name.startswith(("--container-", "--no-container-")):
                raise ValueError(
                    f"flags: {flag!r} must be an option of pyxis, which begin with --container- "
                    "or --no-container-; remove it"
                )
        return self


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """What the container adds to the command that starts the ranks."""

    srun_options: tuple[str, ...] = ()
    rank_prefix: tuple[str, ...] = ()
    rank_python: str | None = None


def wrap(
    container: ContainerSpec | None,
    job: JobDescription,
    *,
    gpus_per_node: int,
    variables: Mapping[str, str],
) -> Wrapping:
    """The container's part of the srun command. `variables` are those that the job is given.

    Raises:
        SpecError: a path that has to be mounted cannot be.
    """
    if container is None:
        return Wrapping()
    mounts = [*_own_mounts(job, variables), *container.mounts]
    if container.kind == "pyxis":
        names = sorted({*variables, *_TOLD})
        options = (
            f"--container-image={container.image}",
            f"--container-mounts={','.join(map(_with_target, mounts))}",
            f"--container-workdir={job.folder}",
            # Otherwise an image's own value of a variable wins.
            f"--container-env={','.join(names)}",
            *container.flags,
        )
        return Wrapping(srun_options=options, rank_python=container.python)
    gpus = ("--nv",) if gpus_per_node and "--rocm" not in container.flags else ()
    prefix = (
        "apptainer",
        "exec",
        *(f"--bind={mount}" for mount in mounts),
        f"--pwd={job.folder}",
        *gpus,
        *container.flags,
        container.image,
    )
    return Wrapping(rank_prefix=prefix, rank_python=container.python)


def variables_of(
    set_by_spec: Mapping[str, str], *, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What a rank has to find inside, whatever the image says: set by the job, or inherited.

    PATH and the like are the image's own.
    """
    return {**{name: environ[name] for name in _INHERITED if name in environ}, **set_by_spec}


def exports(container: ContainerSpec | None, names: Iterable[str]) -> list[str]:
    """Lines of the script that make the job's variables win over the image's own ones."""
    if container is None or container.kind != "apptainer":
        return []
    return [f'export APPTAINERENV_{name}="${name}"' for name in names]


def _own_mounts(job: JobDescription, variables: Mapping[str, str]) -> list[str]:
    read_only = [job.code]
    if job.store.credentials_file is not None:
        read_only.append(job.store.credentials_file)
    read_only += [Path(variables[name]) for name in _FILES if variables.get(name)]
    read_write = (job.folder, *job.folders)
    for path in (*read_write, *read_only):
        if set(str(path)) & set(":,") or not str(path).isprintable():
            raise SpecError(
                f"cluster.container: {str(path)!r} has to be mounted, and must have no ':' and no "
                "',' in it; choose another workdir, or another place for that file"
            )
    return [
        *(f"{path}:{path}" for path in dict.fromkeys(read_write)),
        *(f"{path}:{path}:ro" for path in dict.fromkeys(read_only)),
    ]


def _with_target(mount: str) -> str:
    """pyxis wants both ends of a mount named."""
    match = _MOUNT.fullmatch(mount)
    assert match is not None
    mode = f":{match['mode']}" if match["mode"] else ""
    return f"{match['source']}:{match['target'] or match['source']}{mode}"
