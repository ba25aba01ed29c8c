"""Follows one rank's lines in its node's growing log, a bounded piece at a time."""

from __future__ import annotations

from pathlib import Path

from slurm.job_logs import node_log, split_label

PIECE_BYTES = 256 * 1024
PIECE_LINES = 200


class LogFollower:
    """Hands out the lines that a rank has gained; of a sudden flood only the last ones.

    A job writes what it likes, and whoever watches pays for each line.
    """

    def __init__(self, folder: Path, *, node: str, rank: int) -> None:
        self._folder = folder
        self._node = node
        self._rank = rank
        self._offset = 0
        self._partial = b""

    def new_lines(self) -> tuple[str, ...]:
        """Whole lines that have come since the last call; none while the file is not there."""
        path = node_log(self._folder, self._node)
        try:
            size_bytes = path.stat().st_size
            skipped_bytes = max(0, size_bytes - self._offset - PIECE_BYTES)
            with path.open("rb") as file:
                file.seek(self._offset + skipped_bytes)
                piece = file.read(PIECE_BYTES)
        except OSError:
            # Not there yet, or a shared file system that stutters: the next look will tell.
            return ()
        self._offset += skipped_bytes + len(piece)
        if skipped_bytes:
            self._partial, piece = b"", piece.partition(b"\n")[2]
        *whole, self._partial = (self._partial + piece).split(b"\n")
        labelled = (split_label(line.decode(errors="replace").rstrip("\r")) for line in whole)
        lines = [words for rank, words in labelled if rank == self._rank]
        dropped = max(0, len(lines) - PIECE_LINES)
        if not skipped_bytes and not dropped:
            return tuple(lines)
        note = f"… more than can be shown here: {path} has all of it"
        return (note, *lines[dropped:])

    def last_lines(self) -> tuple[str, ...]:
        """As `new_lines`, and what the rank has left behind without an end of line."""
        lines = self.new_lines()
        rank, words = split_label(self._partial.decode(errors="replace").rstrip("\r"))
        self._partial = b""
        return (*lines, words) if words and rank == self._rank else lines
