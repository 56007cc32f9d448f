"""The replica's Unix socket for rank 0: in a 0700 directory, its name removed as soon as rank 0 has connected."""

import asyncio
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

MAX_PATH_BYTES = 100  # the kernel's limit is 107


class ReplicaSocket:
    """A listening socket for one connection.

    Raises:
        ValueError: the system's temporary directory has too long a name.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="dflash-"))  # mode 0700
        self.path = str(self._directory / "rank0")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(self.path)) >= MAX_PATH_BYTES:
                raise ValueError(
                    f"TMPDIR: the socket path {self.path} is not below {MAX_PATH_BYTES} bytes; choose another one"
                )
            self._listener.bind(self.path)
            self._listener.listen(1)
            self._listener.setblocking(False)
        except BaseException:
            self.close()
            raise

    async def accept(self, *, pid: int) -> socket.socket:
        """The connection from the process `pid`.

        Raises:
            ConnectionRefusedError: another process connected.
        """
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        if hasattr(socket, "SO_PEERCRED"):
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            peer, _, _ = struct.unpack("3i", credentials)
            if peer != pid:
                connection.close()
                raise ConnectionRefusedError(f"process {peer} connected in the place of rank 0, which is {pid}")
        return connection

    def close(self) -> None:
        """Stops listening and removes the name and its directory; a connection already made stays. Idempotent."""
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)
