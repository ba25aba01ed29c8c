"""Follows a growing log file, a bounded piece at a time."""

from __future__ import annotations

from pathlib import Path

PIECE_BYTES = 64 * 1024
PIECE_LINES = 200


class LogFollower:
    """Hands out the lines that a log has gained; of a sudden flood only the last ones.

    A job writes what it likes, and whoever watches pays for each line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def new_lines(self) -> tuple[str, ...]:
        """Whole lines that have come since the last call; none while the file is not there."""
        try:
            size_bytes = self._path.stat().st_size
            skipped_bytes = max(0, size_bytes - self._offset - PIECE_BYTES)
            with self._path.open("rb") as file:
                file.seek(self._offset + skipped_bytes)
                piece = file.read(PIECE_BYTES)
        except OSError:
            # Not there yet, or a shared file system that stutters: the next look will tell.
            return ()
        self._offset += skipped_bytes + len(piece)
        if skipped_bytes:
            self._partial, piece = b"", piece.partition(b"\n")[2]
        *whole, self._partial = (self._partial + piece).split(b"\n")
        lines = [line.decode(errors="replace").rstrip("\r") for line in whole]
        dropped = max(0, len(lines) - PIECE_LINES)
        if not skipped_bytes and not dropped:
            return tuple(lines)
        note = f"… more than can be shown here: {self._path} has all of it"
        return (note, *lines[dropped:])
