"""The storage side of Xet uploads for tests/hub_server.py (not answered yet: every call is a 404)."""


class XetStore:
    def __init__(self, root, url):
        self.root, self.url = root, url

    def has(self, sha256):
        return False

    def call(self, method, path, data):
        return 404, b"{}"
