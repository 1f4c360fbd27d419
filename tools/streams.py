"""A client of servers with OpenAI's interface that spends as little time as possible on each event."""

import asyncio
import json
import urllib.parse


class Client:
    """Streams over one connection after another. What a usual package does for each event takes longer than a small model
    takes for a token."""

    def __init__(self, url, api_key):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self.head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
        self.reader = self.writer = None

    def close(self):
        if self.writer:
            self.writer.close()
        self.reader = self.writer = None

    async def post(self, body):
        """The status and headers of the response. Its events follow."""
        data = json.dumps(body).encode()
        is_used = self.writer is not None
        if not is_used:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        try:
            self.writer.write(f"{self.head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status = int((await self.line()).split()[1])
        except ConnectionError:
            # A server may close the connection after each response.
            self.close()
            if not is_used:
                raise
            return await self.post(body)
        headers = {}
        while line := (await self.line()).strip():
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()
        return status, headers

    async def line(self):
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return line.decode()

    async def whole(self, headers):
        """The body of a response that is no stream."""
        return json.loads(await self.reader.readexactly(int(headers["content-length"])))

    async def events(self):
        """Yields the data of server-sent events in a chunked response."""
        rest = b""
        while size := int((await self.line()).split(";")[0], 16):
            chunk = await self.reader.readexactly(size + 2)
            *lines, rest = (rest + chunk[:-2]).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    yield line[6:]
        await self.line()
