"""HTTP: OpenAI's API for speech on the synthesizer, with the calls, limits and errors of gRPC.

    connection ─▶ application (Starlette: routes) ─▶ Endpoint: token, limits, body ─▶ handler
    bounds, times                                    CallTracker, AccessControl
                                                    SessionEndpoint: the same for WebSockets

A group of routes is one module with a function `routes`, which `app` lists.
"""
