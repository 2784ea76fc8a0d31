"""A run on another machine, followed through its files over ssh: nothing but a shell is needed over there."""

import contextlib
import re
import shlex
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from trifocal.diagnostics.run import Run, read_run
from trifocal.errors import UserError

_ADDRESS = re.compile(r"([A-Za-z0-9][\w.@-]*):(.+)")
_METRICS = "metrics.jsonl"
_OVERLAP_BYTES = 256
# Of every file its name, how many bytes follow, and these. The metrics come from a little before where the last answer
# ended; of a heartbeat the last rows are enough.
_SCRIPT = """(
export LC_ALL=C
cd -- {path} 2>/dev/null || {{ echo MISSING; exit; }}
for file in config.toml heartbeat/rank*.jsonl; do
  if [ -f "$file" ]; then
    case $file in config.toml) text=$(cat "$file");; *) text=$(tail -n 2 "$file");; esac
    echo "$file ${{#text}}"; printf %s "$text"
  fi
done
if [ -f metrics.jsonl ]; then
  size=$(($(wc -c < metrics.jsonl) - {offset}))
  if [ $size -lt 0 ]; then size=0; fi
  echo "metrics.jsonl $size"
  tail -c +$(({offset} + 1)) metrics.jsonl | head -c $size
fi
echo END
)
"""


def remote_address(text: str) -> tuple[str, str] | None:
    """Host and folder of `[user@]host:folder`; None for what is a path of this machine."""
    match = _ADDRESS.fullmatch(text)
    return None if match is None or Path(text).exists() else (match[1], match[2])


class RemoteRun:
    """Keeps a copy of a remote run's small files up to date over one ssh connection.

    Args:
        host: As ssh takes it.
        path: The run directory there; from the home directory, unless it is absolute.
        folder: An empty folder of this machine for the copy.
    """

    def __init__(self, host: str, path: str, folder: Path) -> None:
        self.host, self.path = host, path.removeprefix("~/")
        self.copy = folder / (Path(self.path).name or "run")
        self.copy.mkdir()
        try:
            self._ssh = subprocess.Popen(
                ["ssh", "-o", "ServerAliveInterval=15", host, "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise UserError(f"cannot start ssh: {error.strerror}") from error

    def read(self) -> Run:
        """The run as it is now.

        Raises:
            UserError: If the connection ends, or there is no run.
        """
        if not self._refresh():
            (self.copy / _METRICS).unlink()
            self._refresh()
        return read_run(self.copy, whole_heartbeats=False)

    def _refresh(self) -> bool:
        """Bring the copy up to date; False if the metrics there are others now: a resumed run cuts them."""
        metrics = self.copy / _METRICS
        known = metrics.read_bytes() if metrics.exists() else b""
        overlap = known[-_OVERLAP_BYTES:]
        script = _SCRIPT.format(path=shlex.quote(self.path), offset=len(known) - len(overlap))
        assert self._ssh.stdin is not None
        try:
            self._ssh.stdin.write(script.encode())
            self._ssh.stdin.flush()
        except OSError as error:
            raise self._lost() from error
        unchanged = True
        while (line := self._line()) != "END":
            if line == "MISSING":
                raise UserError(f"no run directory at {self.host}:{self.path}")
            name, _, size = line.rpartition(" ")
            content = self._bytes(int(size))
            target = self.copy / name
            target.parent.mkdir(exist_ok=True)
            if name != _METRICS:
                target.write_bytes(content + b"\n")
            elif content.startswith(overlap):
                with target.open("ab") as file:
                    file.write(content[len(overlap) :])
            else:
                unchanged = False
        return unchanged

    def _line(self) -> str:
        assert self._ssh.stdout is not None
        line = self._ssh.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._lost()
        return line[:-1].decode()

    def _bytes(self, count: int) -> bytes:
        assert self._ssh.stdout is not None
        content = self._ssh.stdout.read(count)
        if len(content) < count:
            raise self._lost()
        return content

    def _lost(self) -> UserError:
        return UserError(f"the connection to {self.host} has ended (ssh: exit status {self._ssh.wait()})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ssh.stdin is not None and self._ssh.stdout is not None
        self._ssh.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._ssh.stdin.close()
        self._ssh.terminate()
        self._ssh.wait()
