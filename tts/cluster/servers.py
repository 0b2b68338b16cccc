"""Servers of `tts.serve` that Ray places on machines, each in a process of an actor.

    place_servers(3, flags) ─▶ 3 actors on the nodes ─▶ python -m tts.serve each ◀═ clients

Ray only chooses the machines and restarts what is lost. Clients, or a proxy with TLS, reach the
servers directly: TLS, health, status details, metrics and other protocols are those of any server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from threading import Thread
from typing import Any

import ray
from ray.actor import ActorHandle

from llm import ConfigError
from tts.cluster.flags import command_line, parsed_flags

READY = re.compile(r"ready: (?P<grpc>\S+)(?P<others>(?: [a-z]+=\S+)*) model=")
LOST = 1  # exit status of an actor whose server has ended


class Server:
    """Server process of one actor; the constructor returns when it is ready.

    Raises ConfigError when it does not start; the actor's log has its reason. When it ends later,
    the actor ends, too, and Ray restarts it, on another node if necessary.
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        own = {"host": ray.util.get_node_ip_address(), **vars(parsed_flags(flags))}
        program = [sys.executable, "-m", "tts.cluster.process", *command_line(own)]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        ready = next(filter(None, map(READY.match, self._output)), None)
        if ready is None:
            raise ConfigError(f"tts.serve ended with status {self._process.wait()}")
        others = (other.partition("=") for other in ready["others"].split())
        self._addresses = {"grpc": ready["grpc"]} | {name: where for name, _, where in others}
        self._is_stopping = False
        Thread(target=self._watch, daemon=True).start()

    def addresses(self) -> dict[str, str]:
        """Return host:port of each protocol: "grpc", and "http" and "wyoming" where they are on."""
        return self._addresses

    def stop(self) -> int:
        """Drain the server, wait for its end and return its exit status."""
        self._is_stopping = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def _watch(self) -> None:
        for line in self._output:
            print(line, end="")
        self._process.wait()
        if not self._is_stopping:
            os._exit(LOST)


def place_servers(count: int, flags: Mapping[str, Any], **options: Any) -> list[ActorHandle]:
    """Place servers on the nodes of Ray's cluster and return their actors, at once.

    `flags` as in `parsed_flags`; without a `host` each listens on the address of its node.
    `options` are those of Ray's actors, such as num_gpus. The servers of handles that are dropped
    drain and end. Raises ConfigError for a wrong name of a flag.
    """
    command_line(flags)
    actor = ray.remote(Server).options(
        **{"num_cpus": 1, "max_restarts": -1, "scheduling_strategy": "SPREAD", **options}
    )
    return [actor.remote(dict(flags)) for _ in range(count)]
