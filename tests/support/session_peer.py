"""A process with a session server that echoes; prints its address, ends with its standard input."""

from __future__ import annotations

import asyncio
import sys

from cluster.types import Incarnation, Role, WorkerId
from cluster.wire.messages import Accepted
from cluster.wire.session import Identity, SessionOptions, SessionServer

LAYOUT = {"block_size": "16", "fingerprint": "aa", "kv_dtype": "float32"}


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Echo:
    def opened(self, session):
        say("opened")

    def received(self, session, body, call):
        session.send(Accepted(body.key), reply_to=call)

    def closed(self, session, reason):
        say(f"closed {reason}")


async def main(heartbeat_s, dead_after_s):
    me = Identity(Role.DECODE, WorkerId("decode-0"), Incarnation("d1"), LAYOUT)
    options = SessionOptions(b"secret", heartbeat_s=heartbeat_s, dead_after_s=dead_after_s)
    server = SessionServer(me, Echo(), options)
    say(await server.start())
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), float(sys.argv[2])))
