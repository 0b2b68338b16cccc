"""`python -m tts.processes.front_end`: front end of the engine's process, for all protocols.

It handles prompts, voices and formats, and holds no weights. Started by the supervisor.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tts.factory import Service, connect_service
from tts.ipc.remote_admission import RemoteAdmission
from tts.ipc.remote_client import RemoteEngineClient
from tts.processes.calls import serve_calls
from tts.processes.child import Launch, Reporter, Signals, run_child
from tts.server.server import SpeechServer


async def run(launch: Launch, report: Reporter) -> int:
    """Listen on the server's ports; serve once the engine is connected."""
    model, server_config = launch.config.model, launch.config.server
    model.load_architectures()  # the configuration was resolved in another process

    async def load(server: SpeechServer) -> Service:
        client = await RemoteEngineClient.connect(launch.endpoints, launch.name)
        if server_config.front_ends > 1:
            server.host.admission = RemoteAdmission(client, server.host.metrics.note_requests)
        return connect_service(model, server_config, client, client.info, launch.voice_folder)

    listening = server_config.model_copy(update=dict(launch.ports))
    config = replace(launch.config, server=listening)
    return await serve_calls(config, Signals(), load, report)


if __name__ == "__main__":
    sys.exit(run_child(run))
