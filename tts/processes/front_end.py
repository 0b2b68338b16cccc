"""`python -m tts.processes.front_end`: gRPC calls in, work for the engine's process out.

It knows prompts, voices and formats, and holds no weights. Started by the supervisor.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tts.factory import Service, connect_service
from tts.ipc.places import SharedAdmission
from tts.ipc.remote_client import RemoteEngineClient
from tts.processes.calls import serve_calls
from tts.processes.child import Launch, Reporter, Signals, run_child
from tts.server import SpeechServer


async def run(launch: Launch, report: Reporter) -> int:
    """Listen on the server's port; serve once the engine is there."""
    model, server_config = launch.config.model, launch.config.server
    model.load_architectures()  # it was resolved in another process

    async def load(server: SpeechServer) -> Service:
        client = await RemoteEngineClient.connect(launch.endpoints, launch.name)
        if server_config.front_ends > 1:
            server.host.admission = SharedAdmission(client, server.host.metrics.note_requests)
        return connect_service(model, server_config, client, client.facts, launch.voice_folder)

    listening = server_config.model_copy(update={"port": launch.port})
    config = replace(launch.config, server=listening)
    return await serve_calls(config, Signals(), load, report)


if __name__ == "__main__":
    sys.exit(run_child(run))
