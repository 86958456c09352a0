"""A bucket on loopback that is a process of its own and can be killed: FTP, which fsspec speaks by itself.

    python -m tests.ftp_server FOLDER PORT [SECONDS]    # SECONDS: how long each upload of 64 KiB takes

Knows the user ada with PASSWORD, and what fsspec's file system asks. An upload is a file that grows.
"""

import contextlib
import os
import socket
import socketserver
import sys
import time
from pathlib import Path

PASSWORD = "ftp-pass-4242"


class Session(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self):
        self.offset, self.renamed, self.user = 0, None, ""
        with contextlib.suppress(ConnectionError):  # whoever asked was killed
            self.answer("220 ready")
            for line in self.rfile:
                verb, _, rest = line.decode().strip().partition(" ")
                try:
                    getattr(self, verb.upper())(rest)
                except AttributeError:
                    self.answer("502 unknown")
                except (FileNotFoundError, NotADirectoryError) as error:
                    self.answer(f"550 {error.strerror}")

    def answer(self, text):
        self.wfile.write(f"{text}\r\n".encode())

    def path(self, name):
        return self.server.folder / name.strip("/")

    def USER(self, name):
        self.user = name
        self.answer("331 password")

    def PASS(self, word):
        known = self.user == "ada" and word == PASSWORD
        self.answer("230 welcome" if known else "530 wrong password")

    def TYPE(self, _):
        self.answer("200 fine")

    def REST(self, offset):
        self.offset = int(offset)
        self.answer("350 from there")

    def PASV(self, _):
        self.listening = socket.create_server(("127.0.0.1", 0))
        high, low = divmod(self.listening.getsockname()[1], 256)
        self.answer(f"227 here (127,0,0,1,{high},{low})")

    def transfer(self, move):
        self.answer("150 come")
        with self.listening, self.listening.accept()[0] as data:
            move(data)
        self.offset = 0
        self.answer("226 done")

    def MLSD(self, name):
        kinds = [(path.name, "dir" if path.is_dir() else "file") for path in self.path(name).iterdir()]
        size = {kind: 0 if kind == "dir" else 1 for _, kind in kinds}
        text = "".join(f"type={kind};size={size[kind]}; {name}\r\n" for name, kind in kinds)
        self.transfer(lambda data: data.sendall(text.encode()))

    def RETR(self, name):
        content = self.path(name).read_bytes()
        self.transfer(lambda data: data.sendall(content))

    def STOR(self, name):
        with open(self.path(name), "r+b" if self.offset else "wb", buffering=0) as file:
            file.seek(self.offset)

            def receive(data):
                while chunk := data.recv(1 << 16):
                    time.sleep(self.server.seconds)
                    file.write(chunk)

            self.transfer(receive)

    def DELE(self, name):
        self.path(name).unlink()
        self.answer("250 gone")

    def RMD(self, name):
        self.path(name).rmdir()
        self.answer("250 gone")

    def MKD(self, name):
        self.path(name).mkdir()
        self.answer("257 made")

    def RNFR(self, name):
        self.renamed = self.path(name)
        self.answer("350 to where")

    def RNTO(self, name):
        os.replace(self.renamed, self.path(name))
        self.answer("250 moved")

    def QUIT(self, _):
        self.answer("221 bye")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[2])), Session) as server:
        server.folder, server.seconds = Path(sys.argv[1]), float(sys.argv[3]) if sys.argv[3:] else 0.0
        server.serve_forever(0.05)
